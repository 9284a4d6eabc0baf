"""A cache of operations' results on torch's meta device, by the shapes of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.ops.live_storages import tensors_in

_SCALARS = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_allocate = torch.ops.aten.empty_strided.default


class _New(NamedTuple):
    """Description of a new tensor that shares its storage with no other tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> _New:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        made: Tensor = _allocate(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made


class _Several(NamedTuple):
    """Description of a tuple of results: new tensors, numbers or None."""

    each: tuple[_New | int | None, ...]

    def make(self) -> tuple[Tensor | int | None, ...]:
        return tuple(one.make() if isinstance(one, _New) else one for one in self.each)


class Results:
    """Caller of operations on the meta device that makes each kind of call only once.

    A run without values spends most of its time computing shapes in Python. Two calls are of one
    kind if their tensors have the same shapes, strides and types and all other arguments are equal.
    If the first call returned new tensors, later calls return tensors of the same form; if it
    returned an argument that it had filled, they return that argument.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], _New | _Several | int] = {}
        self._views: set[Callable[..., Any]] = set()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        """Return the results of `function`, a torch operation or its stand-in; `inputs` are the
        tensors among its arguments."""
        if function in self._views:
            return function(*args, **kwargs)
        try:
            key = (function, *map(_kind, args), *((name, _kind(kwargs[name])) for name in kwargs))
        except TypeError:
            return function(*args, **kwargs)
        found = self._found.get(key)
        if isinstance(found, int):
            return inputs[found]
        if found is not None:
            return found.make()
        before = [_New.like(tensor) for tensor in inputs]
        out = function(*args, **kwargs)
        self._keep(key, out, inputs, before)
        return out

    def _keep(
        self, key: tuple[Any, ...], out: Any, inputs: Sequence[Tensor], before: Sequence[_New]
    ) -> None:
        """Cache the result of a call, or remember that the function returns views."""
        for index, (tensor, form) in enumerate(zip(inputs, before, strict=True)):
            if out is tensor:
                if _New.like(tensor) == form and not _changes_shapes(key[0]):
                    self._found[key] = index
                return
        seen = {tensor.untyped_storage()._cdata for tensor in inputs}
        if any(tensor.untyped_storage()._cdata in seen for tensor in tensors_in(out)):
            self._views.add(key[0])
        elif isinstance(out, Tensor) and _is_alone(out):
            self._found[key] = _New.like(out)
        elif isinstance(out, tuple) and all(map(_is_known, out)):
            storages = {tensor.untyped_storage()._cdata for tensor in tensors_in(out)}
            if len(storages) == len([*tensors_in(out)]):
                each = (_New.like(one) if isinstance(one, Tensor) else one for one in out)
                self._found[key] = _Several(tuple(each))


def _kind(value: Any) -> object:
    """Return a hashable description of an argument; results may depend only on this description.
    Raise TypeError for an argument of an unknown type."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return _New.like(value)
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if value is None or isinstance(value, _SCALARS):
        return type(value), value
    raise TypeError


def _changes_shapes(function: Any) -> bool:
    return torch.Tag.inplace_view in getattr(function, "tags", ())


def _is_known(result: Any) -> bool:
    return result is None or isinstance(result, int) or _is_alone(result)


def _is_alone(result: Any) -> bool:
    """Whether a result is a meta tensor that fills its whole storage."""
    if type(result) is not Tensor or not result.is_meta or result.storage_offset():
        return False
    whole = _New.like(result).make().untyped_storage().size()
    return result.untyped_storage().size() == whole
