"""Makes the units of a transformers class: without values for plans, with values for a stage."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megapipe.errors import ConfigError
from megapipe.layers.rng import seed_of, seeded
from megapipe.model.hf.calls import LayerCalls
from megapipe.model.hf.outline import Outline, UnfitClassError, outline_of
from megapipe.model.hf.source import ClassSource
from megapipe.model.hf.tensor_parallel import plan_of, split_units
from megapipe.model.hf.units import Unit, units_of
from megapipe.model.hf.weights import FolderWeights, Known, draw_weights

CPU = torch.device("cpu")


class UnitFactory:
    """Makes the units of a class one by one: embedding, layers, head.

    Raises ConfigError for a class that does not fit into a pipeline.
    """

    def __init__(self, source: ClassSource) -> None:
        self.source = source

    def problem(self, text: str) -> ConfigError:
        return self.source.problem(text)

    @cached_property
    def on_meta(self) -> Any:
        """The class on torch's meta device."""
        return self.source.on_meta()

    @cached_property
    def outline(self) -> Outline:
        """The parts of the class."""
        try:
            return outline_of(self.on_meta)
        except UnfitClassError as error:
            raise self._unfit(str(error)) from None
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._unfit(f"it does not run on the meta device: {text}") from error

    def _unfit(self, reason: str) -> ConfigError:
        return self.problem(f"{type(self.on_meta).__name__} cannot be cut into stages: {reason}")

    @cached_property
    def _bare(self) -> Any:
        """The class with buffers and without parameters."""
        return self.source.without_weights()

    @cached_property
    def _calls(self) -> LayerCalls:
        calls = LayerCalls(self._bare, self.outline)
        try:
            calls.check(self.source.vocab_size)
        except UnfitClassError as error:
            raise self._unfit(str(error)) from None
        return calls

    @cached_property
    def _units(self) -> list[Unit]:
        """The units without values of their parameters."""
        units = units_of(self._bare, self.outline, self._calls)
        split_units(units, plan_of(self._bare))
        return units

    @cached_property
    def _weights(self) -> FolderWeights | None:
        files = self.source.files
        return None if files is None else FolderWeights(files, self._bare)

    def sketch(self) -> list[nn.Module]:
        """Return all units without values, on torch's meta device."""
        return [*deepcopy(self._units)]

    def make(self, seed: int, wanted: Collection[int]) -> dict[int, nn.Module]:
        """Make the units `wanted` with values, by number."""
        made = deepcopy({number: self._units[number] for number in sorted(wanted)})
        known: Known = {}
        for number, unit in made.items():
            if self._weights is not None:
                self._weights.fill(unit, known)
            else:
                with seeded(CPU, seed_of(seed, "model.source", number)), CPU:
                    draw_weights(self._bare, unit, known)
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
