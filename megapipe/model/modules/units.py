"""The layers that a user-defined function returns, and their parameters.

Each item of the returned list is a module, or a function without arguments that makes a module.
Modules in the list are made in the list's order from one seed. A module made by a function has a
separate seed, and is made only if its layer is needed, so large models are lists of functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.errors import ConfigError
from megapipe.layers.rng import seed_of, seeded
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.user_linear import Linear, user_parameter
from megapipe.util.user_code import FAILURES, UserCode

Item = nn.Module | Callable[[], nn.Module]
CPU = torch.device("cpu")
HEADS_PARTIAL = "heads_partial"
"""Attribute of a module between a ColumnLinear and a RowLinear, such as a norm of heads: if it is
true, the gradients of its parameters are summed over tp."""


class LayerSource(Protocol):
    """Maker of a model's layers, which also names them."""

    def problem(self, text: str) -> ConfigError:
        """Return an error that begins with the name of the source."""

    def sketch(self) -> list[nn.Module]:
        """Make all layers without values, on torch's meta device."""

    def make(self, seed: int, wanted: Collection[int]) -> dict[int, nn.Module]:
        """Make the layers `wanted` with initial values, by number. Others may be made too."""

    def module_name(self, number: int, layer: nn.Module, path: str) -> str:
        """Return the name, in checkpoints, of the module at `path` in a layer."""

    def label(self, number: int) -> str:
        """Name a layer in messages."""


class ModelFactory(NamedTuple):
    """The user-defined function that returns a model's layers, with its arguments."""

    spec: str
    """The function as text, ``module:name``."""
    arguments: Mapping[str, Any]
    """Arguments: ``vocab_size``, ``sequence_length`` and ``model.options``."""

    def problem(self, text: str) -> ConfigError:
        return ConfigError(f"model.source={self.spec}: {text}")

    def items(self) -> list[Item]:
        """Call the function on torch's default device; return its list."""
        code = UserCode(self.spec, what="model.source=", error=ConfigError)
        options = [name for name in self.arguments if name not in ("vocab_size", "sequence_length")]
        unknown = [name for name in options if name not in code.parameters()]
        if unknown and not code.takes_all:
            raise self.problem(f"the function has no parameter for model.options.{unknown[0]}")
        made = code.call(self.arguments, ("vocab_size", "sequence_length", *options))
        items = list(made) if isinstance(made, (list, tuple, nn.Sequential, nn.ModuleList)) else []
        if not items or not all(callable(item) for item in items):
            raise self.problem("expected a list of modules, or of functions that make them")
        return items

    def make(self, seed: int, wanted: Collection[int]) -> dict[int, nn.Module]:
        """Make modules with initial values, by layer number: every item that is a module, and the
        items in `wanted` that are functions."""
        with seeded(CPU, seed_of(seed, "model.source")), CPU:
            items = self.items()
        found = {}
        for number, item in enumerate(items):
            if isinstance(item, nn.Module) or number in wanted:
                with seeded(CPU, seed_of(seed, "model.source", number)), CPU:
                    found[number] = self.module(number, item)
        return found

    def sketch(self) -> list[nn.Module]:
        """Make all modules without values, on torch's meta device.

        If the function needs values, as for ``linspace(0, 0.1, 8).tolist()``, the modules are made
        on the CPU first.
        """
        try:
            with torch.device("meta"):
                return [self.module(number, item) for number, item in enumerate(self.items())]
        except ConfigError:
            made = list(self.make(0, range(sys.maxsize)).values())
        tensors = [t for module in made for t in (*module.parameters(), *module.buffers())]
        return deepcopy(made, {id(tensor): _without_values(tensor) for tensor in tensors})

    def module_name(self, number: int, layer: nn.Module, path: str) -> str:
        """Return the name, in checkpoints, of the module at `path` in a layer."""
        return f"layers.{number}.{path}".rstrip(".")

    def label(self, number: int) -> str:
        """Name a layer in messages."""
        return f"layer {number}"

    def module(self, number: int, item: Item) -> nn.Module:
        """Return an item of the list as a module, calling it if it is a function."""
        try:
            module = item if isinstance(item, nn.Module) else item()
        except FAILURES as error:  # whatever user code raises
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.problem(f"layer {number} cannot be made: {text}") from error
        if not isinstance(module, nn.Module):
            raise self.problem(f"layer {number} is a {type(module).__name__}, not a module")
        return module


def _without_values(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta", requires_grad=False)
    is_parameter = isinstance(tensor, Parameter)
    return Parameter(bare, tensor.requires_grad) if is_parameter else bare


class ParameterPlace(NamedTuple):
    """A parameter of a layer: its module, its attribute name in that module, and its spec."""

    layer: int
    module: nn.Module
    attribute: str
    spec: ParameterSpec


class _Occurrence(NamedTuple):
    layer: int
    name: str
    """Path of the module inside the model, e.g. layers.3.mlp."""
    module: nn.Module
    attribute: str


def parameter_places(
    layers: Mapping[int, nn.Module], last: int, source: LayerSource
) -> Iterator[ParameterPlace]:
    """Yield all parameters of `layers`. `last`: index of the model's last layer.

    A parameter that the first and the last layer share is tied. Raises :class:`ConfigError` if
    other layers share a parameter.
    """
    occurrences: dict[Parameter, list[_Occurrence]] = {}
    for number, layer in layers.items():
        for path, module in layer.named_modules():
            name = source.module_name(number, layer, path)
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    occurrence = _Occurrence(number, name, module, attribute)
                    occurrences.setdefault(parameter, []).append(occurrence)
    sharing = {
        occurrence.module for own in occurrences.values() if len(own) > 1 for occurrence in own
    }
    for parameter, own in occurrences.items():
        first = own[0]
        if parameter.is_complex():
            raise source.problem(f"{first.name}.{first.attribute} is complex: expected real values")
        if not parameter.requires_grad:
            raise source.problem(
                f"{first.name}.{first.attribute} has requires_grad=False: expected true, or a "
                "buffer in its place"
            )
        if isinstance(first.module, Linear) and first.module not in sharing:
            spec = first.module.spec(first.name, first.attribute)
            yield ParameterPlace(first.layer, first.module, first.attribute, spec)
        else:
            yield from _uses(parameter, own, last, source)


def _uses(
    parameter: Parameter, occurrences: Sequence[_Occurrence], last: int, source: LayerSource
) -> Iterator[ParameterPlace]:
    """Yield every use of `parameter`. Its gradient is computed by autograd, not deferred."""
    first = occurrences[0]
    holders = {occurrence.layer for occurrence in occurrences}
    if len(holders) > 1 and holders != {0, last}:
        raise source.problem(
            f"layers {sorted(holders)} share {first.name}.{first.attribute}: only the first and "
            "the last layer of a model may share a parameter"
        )
    is_embedding = any(isinstance(occurrence.module, nn.Embedding) for occurrence in occurrences)
    for occurrence in occurrences:
        use = None if len(holders) == 1 else int(occurrence.layer == last)
        name = f"{first.name}.{first.attribute}"
        partial = getattr(occurrence.module, HEADS_PARTIAL, False)
        spec = user_parameter(
            parameter, name, is_embedding=is_embedding, use=use, heads_partial=partial
        )
        yield ParameterPlace(occurrence.layer, occurrence.module, occurrence.attribute, spec)
