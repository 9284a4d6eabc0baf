"""The values of a transformers class's tensors: from files, or drawn as the class draws them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from megapipe.errors import CheckpointError
from megapipe.model.hf.units import Unit
from megapipe.model.tensor_files import StoredTensors

Known = dict[Parameter, Parameter]
"""For parameters without values the ones with values that take their place. Units share some."""


class _Source(NamedTuple):
    """The tensors of the files from which one or several tensors of the class are made."""

    converter: WeightConverter | None
    names: list[tuple[str, str]]
    """For each tensor of the files its name and the pattern of the converter that it matches."""


class FolderWeights:
    """Reads tensors of a class from a folder by the class's own conversions.

    Only the tensors that are asked for are read.

    Args:
        files: the tensors of the folder.
        model: the class, without values.
    """

    def __init__(self, files: StoredTensors, model: Any) -> None:
        self.files, self.model = files, model
        self._sources: dict[str, _Source] = {}
        """Sources by the name of the first tensor that is made from each."""
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        wanted, prefix = model.state_dict(), model.base_model_prefix
        for name in sorted(files.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if target not in wanted and name in wanted:
                target, pattern = rename_source_key(name, [], [], prefix, wanted)
            converter = None if pattern is None else by_pattern[pattern]
            source = self._sources.setdefault(target, _Source(converter, []))
            source.names.append((name, pattern or name))
        names: dict[Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self._tied = {name: own for own in names.values() for name in own}
        """For each parameter of the class all its names: several if it is tied."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the files have all of some tensors of the class, in their shapes if nothing is
        converted. Only the files' headers are read.

        Raises:
            CheckpointError: the files lack a tensor, or have one of another shape.
        """
        converted = {
            target.rpartition(".")[0] for target, each in self._sources.items() if each.converter
        }
        for name, tensor in tensors.items():
            names = self._tied.get(name, [name])
            found = next((each for each in names if each in self._sources), None)
            if found is None and name.rpartition(".")[0] not in converted:
                raise self._problem(name, "the files have no such tensor")
            if found is not None and self._sources[found].converter is None:
                shape = self.files.tensors[self._sources[found].names[-1][0]].shape
                if shape != tensor.shape:
                    wanted = tuple(tensor.shape)
                    raise self._problem(
                        name, f"the files have the shape {shape}: expected {wanted}"
                    )

    def _problem(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.files.folder}: {name} of {type(self.model).__name__}: {what}"
        )

    def fill(self, unit: Unit, known: Known) -> None:
        """Give the parameters and saved buffers of a unit the values of the files. Parameters have
        the types of the files.

        Raises:
            CheckpointError: the files lack a tensor, or have one of another shape.
        """
        places = list(_without_values(unit, known))
        names = {place.path: self._tied.get(place.path, [place.path]) for place in places}
        values = self.read({name for own in names.values() for name in own})
        for place in places:
            value = next((values[name] for name in names[place.path] if name in values), None)
            if value is None:
                raise self._problem(place.path, "the files have no such tensor")
            if value.shape != place.tensor.shape:
                raise self._problem(
                    place.path,
                    f"the files have the shape {tuple(value.shape)}: expected "
                    f"{tuple(place.tensor.shape)}",
                )
            place.put(value, known)

    def read(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return those of the tensors `wanted` of the class that the files have."""
        modules = {name.rpartition(".")[0] for name in wanted}
        found: dict[str, Tensor] = {}
        for target, source in self._sources.items():
            # a converter makes the tensors of one module
            if target in wanted or (source.converter and target.rpartition(".")[0] in modules):
                found |= {name: t for name, t in self._made(target, source) if name in wanted}
        return found

    def _made(self, target: str, source: _Source) -> Iterator[tuple[str, Tensor]]:
        if source.converter is None:
            yield target, self.files.read(source.names[-1][0])
            return
        converter: Any = deepcopy(source.converter)
        for name, pattern in source.names:
            converter.add_tensor(target, name, pattern, partial(self.files.read, name))
        made = converter.convert(target, model=self.model, config=self.model.config)
        for name, tensor in made.items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def draw_weights(model: Any, unit: Unit, known: Known) -> None:
    """Give the parameters of a unit initial values, as the class does.

    Raises:
        CheckpointError: the class leaves a parameter without a value.
    """
    for place in list(_without_values(unit, known)):
        if isinstance(place.tensor, Parameter):
            place.put(torch.full_like(place.tensor, torch.nan, device="cpu"), known)
    with torch.no_grad(), initialization.guard_torch_init_functions():
        for module in reversed(list(unit.modules())):  # inner ones first
            model._init_weights(module)
    for path, parameter in unit.named_parameters():
        if parameter.isnan().any():
            raise CheckpointError(
                f"{type(model).__name__} draws no initial values for {unit.name_in_class(path)}: "
                "expected a folder with weights"
            )
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # of a later unit too


class _Place(NamedTuple):
    """A tensor of a unit that has no values yet."""

    path: str
    """Name of the tensor in the class."""
    module: nn.Module
    name: str
    tensor: Tensor

    def put(self, value: Tensor, known: Known) -> None:
        if isinstance(self.tensor, Parameter):
            new = known.setdefault(self.tensor, Parameter(value, self.tensor.requires_grad))
            self.module._parameters[self.name] = new
        else:
            self.module._buffers[self.name] = value.to(self.tensor.dtype)


def _without_values(unit: Unit, known: Known) -> Iterator[_Place]:
    """Yield the parameters and saved buffers of a unit. Parameters that are known take their
    places."""
    for path, module in unit.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter in known:
                module._parameters[name] = known[parameter]
            else:
                in_class = unit.name_in_class(f"{path}.{name}")
                yield _Place(in_class, module, name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _Place(unit.name_in_class(f"{path}.{name}"), module, name, buffer)
