"""The layers that a user's function returns, and their parameters.

An item of the list is a module, or a function without arguments that makes one. Modules are made
in the order of the list from one seed; a function's from a seed of its own, and only where its
layer is needed, so large models are lists of functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.errors import ConfigError
from megapipe.layers.own import Linear, user_parameter
from megapipe.layers.rng import seed_of, seeded
from megapipe.layers.specs import ParameterSpec
from megapipe.util.user_code import FAILURES, UserCode

Item = nn.Module | Callable[[], nn.Module]
CPU = torch.device("cpu")


class ModelFactory(NamedTuple):
    """The user's function, and what it is given."""

    spec: str
    """``module:name``."""
    given: Mapping[str, Any]
    """``vocab_size``, ``sequence_length`` and ``model.options``."""

    def problem(self, text: str) -> ConfigError:
        return ConfigError(f"model.source={self.spec}: {text}")

    def items(self) -> list[Item]:
        """The list that the function returns; made on torch's default device."""
        code = UserCode(self.spec, what="model.source=", error=ConfigError)
        options = [name for name in self.given if name not in ("vocab_size", "sequence_length")]
        unknown = [name for name in options if name not in code.parameters()]
        if unknown and not code.takes_all:
            raise self.problem(f"it does not take model.options.{unknown[0]}")
        made = code.call(self.given, ("vocab_size", "sequence_length", *options))
        items = list(made) if isinstance(made, (list, tuple, nn.Sequential, nn.ModuleList)) else []
        if not items or not all(callable(item) for item in items):
            raise self.problem("expected a list of modules, or of functions that make them")
        return items

    def make(self, seed: int, wanted: range) -> dict[int, nn.Module]:
        """Modules by number, with their initial values: of all layers that the list has as modules,
        and of those `wanted` that it has as functions."""
        with seeded(CPU, seed_of(seed, "model.source")), CPU:
            items = self.items()
        found = {}
        for number, item in enumerate(items):
            if isinstance(item, nn.Module) or number in wanted:
                with seeded(CPU, seed_of(seed, "model.source", number)), CPU:
                    found[number] = self.module(number, item)
        return found

    def sketch(self) -> list[nn.Module]:
        """All modules without values, on torch's meta device.

        Where the function needs a value, as ``linspace(0, 0.1, 8).tolist()`` does, the modules are
        made on the CPU first.
        """
        try:
            with torch.device("meta"):
                return [self.module(number, item) for number, item in enumerate(self.items())]
        except ConfigError:
            made = list(self.make(0, range(sys.maxsize)).values())
        tensors = [t for module in made for t in (*module.parameters(), *module.buffers())]
        return deepcopy(made, {id(tensor): _without_values(tensor) for tensor in tensors})

    def module(self, number: int, item: Item) -> nn.Module:
        """An item of the list as a module."""
        try:
            module = item if isinstance(item, nn.Module) else item()
        except FAILURES as error:  # whatever the user's code raises
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
    """A parameter in a layer."""

    layer: int
    module: nn.Module
    attribute: str
    spec: ParameterSpec


class _Home(NamedTuple):
    layer: int
    name: str
    """Of the module."""
    module: nn.Module
    attribute: str


def places(
    layers: Mapping[int, nn.Module], last: int, source: ModelFactory
) -> Iterator[ParameterPlace]:
    """All parameters of some layers, of a model whose last one is number `last`.

    A parameter that the first and the last layer share is tied. Raises :class:`ConfigError` where
    other layers share one.
    """
    homes: dict[Parameter, list[_Home]] = {}
    for number, layer in layers.items():
        for path, module in layer.named_modules():
            name = f"layers.{number}.{path}".rstrip(".")
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    home = _Home(number, name, module, attribute)
                    homes.setdefault(parameter, []).append(home)
    sharing = {home.module for own in homes.values() if len(own) > 1 for home in own}
    for parameter, own in homes.items():
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
    parameter: Parameter, homes: Sequence[_Home], last: int, source: ModelFactory
) -> Iterator[ParameterPlace]:
    """The places of a parameter whose gradient autograd computes."""
    first = homes[0]
    holders = {home.layer for home in homes}
    if len(holders) > 1 and holders != {0, last}:
        raise source.problem(
            f"layers {sorted(holders)} share {first.name}.{first.attribute}: only the first and "
            "the last layer of a model may share a parameter"
        )
    is_embedding = any(isinstance(home.module, nn.Embedding) for home in homes)
    for home in homes:
        use = None if len(holders) == 1 else int(home.layer == last)
        name = f"{first.name}.{first.attribute}"
        spec = user_parameter(parameter, name, is_embedding=is_embedding, use=use)
        yield ParameterPlace(home.layer, home.module, home.attribute, spec)
