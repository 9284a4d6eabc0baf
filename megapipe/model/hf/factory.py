"""Makes the units of a transformers class: without values for plans, with values for a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.lora_specs import Lora
from megapipe.layers.rng import seed_of, seeded
from megapipe.model.hf import attention
from megapipe.model.hf.calls import LayerCalls
from megapipe.model.hf.lora import adapt_units, is_adapter, unknown_targets
from megapipe.model.hf.outline import Outline, outline_of
from megapipe.model.hf.source import ClassSource
from megapipe.model.hf.stand_ins import UnfitClassError
from megapipe.model.hf.tensor_parallel import plan_of, split_units
from megapipe.model.hf.units import Unit, units_of
from megapipe.model.hf.weights import FolderWeights, Known, draw_weights
from megapipe.text import one_line

CPU = torch.device("cpu")
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of a class that does not run on the meta device, or not with masks as patterns."""


class _Trial(NamedTuple):
    """Result of a run of a class on torch's meta device."""

    name: str
    """Name of the class."""
    attention: str | None
    """Name of its attention in transformers; None: transformers chooses."""
    outline: Outline


class UnitFactory:
    """Makes the units of a class one by one: embedding, layers, head; with `lora` its layers have
    adapters.

    Raises ConfigError for a class that does not fit into a pipeline.
    """

    def __init__(self, source: ClassSource, lora: Lora | None = None) -> None:
        self.source, self.lora = source, lora

    def problem(self, text: str) -> ConfigError:
        return self.source.problem(text)

    @cached_property
    def _trial(self) -> _Trial:
        """The class on torch's meta device, with megapipe's attention if that fits."""
        why = ""
        try:
            model = self.source.on_meta(attention.NAME)
            outline = outline_of(model)
            if any(outline.attention):
                return _Trial(type(model).__name__, attention.NAME, outline)
        except UnfitClassError as error:
            why = str(error)
        except ConfigError:
            why = "it cannot have an attention other than its own"
        except FAILURES as error:
            why = f"with masks as patterns it fails: {type(error).__name__}: {one_line(error)}"
        model = self.source.on_meta(None)
        name = type(model).__name__
        try:
            return _Trial(name, None, replace(outline_of(model), own_attention=why))
        except UnfitClassError as error:
            raise self._unfit(name, str(error)) from None
        except FAILURES as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._unfit(name, f"it does not run on the meta device: {text}") from error

    @property
    def class_name(self) -> str:
        return self._trial.name

    @property
    def outline(self) -> Outline:
        """The parts of the class."""
        return self._trial.outline

    def _unfit(self, name: str, reason: str) -> ConfigError:
        return self.problem(f"{name} cannot be cut into stages: {reason}")

    @cached_property
    def bare(self) -> Any:
        """The class with buffers and without parameters."""
        return self.source.without_weights(self._trial.attention)

    @cached_property
    def calls(self) -> LayerCalls:
        """The arguments of the layers."""
        calls = LayerCalls(self.bare, self.outline)
        try:
            calls.check(self.source.vocab_size)
        except UnfitClassError as error:
            raise self._unfit(self.class_name, str(error)) from None
        return calls

    @cached_property
    def _units(self) -> list[Unit]:
        """The units without values of their parameters."""
        units = units_of(self.bare, self.outline, self.calls)
        split_units(units, plan_of(self.bare))
        return units

    @cached_property
    def _weights(self) -> FolderWeights | None:
        files = self.source.files
        return None if files is None else FolderWeights(files, self.bare)

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of all units but those of adapters, without values, by their names in
        checkpoints."""
        return self._named(self._units)

    @cached_property
    def adapters(self) -> dict[str, nn.Parameter]:
        """The parameters of adapters, without values, by their names in checkpoints."""
        return {n: p for n, p in self._named(self.sketch()).items() if is_adapter(n)}

    def _named(self, units: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
        found: dict[nn.Parameter, str] = {}
        for unit in units:
            assert isinstance(unit, Unit)
            for path, parameter in unit.named_parameters():
                found.setdefault(parameter, unit.name_in_class(path))
        return {name: parameter for parameter, name in found.items()}

    def check(self) -> None:
        """Raise ConfigError if the folder lacks a tensor of the class, or the class a layer that
        gets adapters."""
        if self.lora is not None:
            problem = unknown_targets(self._units, self.lora.targets)
            if problem is not None:
                raise self.problem(f"lora.targets={[*self.lora.targets]}: {problem}")
        if self._weights is None:
            return
        try:
            self._weights.check(
                {name: t for own in self.saved_tensors() for name, t in own.items()}
            )
        except CheckpointError as error:
            raise self.problem(str(error)) from None

    def saved_tensors(self) -> list[dict[str, Tensor]]:
        """Return the tensors that the class saves, without values, by name: first those around the
        layers, then those of each layer. Tied tensors have one name."""
        known = {*self.trained, *(name for name, _ in self.bare.named_parameters())}
        aliases = {name for name, _ in self.bare.named_parameters(remove_duplicate=False)} - known
        groups: dict[str, dict[str, Tensor]] = {"": {}}
        for name, tensor in self.bare.state_dict().items():
            if name not in aliases:
                rest = name.removeprefix(f"{self.outline.stack}.")
                layer = "" if rest == name else rest.partition(".")[0]
                groups.setdefault(layer, {})[name] = tensor
        return [*groups.values()]

    def untrained(self, name: str) -> Tensor:
        """Return a tensor that no unit trains: a buffer, or a parameter without effect."""
        if self._weights is not None:
            return self._weights.read([name])[name]
        tensor: Tensor = self.bare.state_dict()[name]
        if tensor.is_meta:
            raise self.problem(f"{name} has no effect and no values: it cannot be exported")
        return tensor.clone()

    def sketch(self) -> list[nn.Module]:
        """Return all units without values, on torch's meta device."""
        units = deepcopy(self._units)
        if self.lora is not None:
            with torch.device("meta"):
                adapt_units(units, self.lora)
        return [*units]

    def make(self, seed: int, wanted: Collection[int]) -> dict[int, nn.Module]:
        """Make the units `wanted` with values, by number."""
        made = deepcopy({number: self._units[number] for number in sorted(wanted)})
        known: Known = {}
        for number, unit in made.items():
            if self._weights is not None:
                self._weights.fill(unit, known)
            else:
                with seeded(CPU, seed_of(seed, "model.source", number)), CPU:
                    draw_weights(self.bare, unit, known)
            if self.lora is not None:
                with seeded(CPU, seed_of(seed, "lora", number)), CPU:
                    adapt_units([unit], self.lora)
        return {**made}

    def module_name(self, number: int, unit: nn.Module, path: str) -> str:
        """Return the name in checkpoints of the module at `path` in a unit: the class's own."""
        assert isinstance(unit, Unit)
        return unit.name_in_class(path)

    def label(self, number: int) -> str:
        """Name a unit in messages."""
        if number in (0, len(self.outline.forms) + 1):
            return "head" if number else "embedding"
        return f"layer {number - 1}"
