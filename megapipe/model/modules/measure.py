"""Sizes of a user's layers, found by running them on torch's meta device.

Nothing is computed there: shapes, FLOPs and what autograd keeps are all that there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from megapipe.dtypes import Dtype
from megapipe.errors import MegapipeError
from megapipe.layers.own import ColumnLinear, Linear, RowLinear
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.interface import TensorShape
from megapipe.model.modules.units import Source


class Measured(NamedTuple):
    """One layer on one micro-batch."""

    flops: int
    """Of the forward."""
    deferred: int
    """Those of linear layers whose weight gradient waits for ``W``."""
    saved: int
    """Bytes that autograd keeps for the backward, its input among them."""
    queued: int
    """Bytes that wait for ``W``."""
    output: tuple[TensorShape, ...]
    columns: tuple[int, ...]
    """Inputs per token of each column layer, whose gradients are summed over tp."""
    rows: tuple[int, ...]
    """Outputs per token of each row layer, which are summed over tp."""


def measure(
    source: Source, layers: Sequence[nn.Module], rows: int, length: int, dtype: Dtype
) -> list[Measured]:
    """Run `rows` sequences of `length` tokens through modules on the meta device.

    Raises :class:`ConfigError` where a layer cannot be run there, or returns no tensors.
    """
    x: Any = (torch.empty(rows, length, dtype=torch.int64, device="meta"),)
    found = []
    for number, layer in enumerate(layers):
        layer.to("meta", TORCH_DTYPES[dtype])
        before = {name: buffer._version for name, buffer in layer.named_buffers()}
        try:
            y, one = _run(layer, x)
        except MegapipeError:
            raise
        except Exception as error:  # whatever the user's code raises
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise source.problem(f"layer {number} fails on the meta device: {text}") from error
        y = y if isinstance(y, tuple) else (y,)
        if (name := _changed(layer, before)) is not None:
            raise source.problem(
                f"layer {number} changes its buffer {name} while it runs, which no checkpoint "
                "has: expected layers whose state are parameters (LayerNorm, not BatchNorm)"
            )
        if not y or not all(isinstance(each, Tensor) for each in y):
            raise source.problem(
                f"layer {number} returns {type(y[0]).__name__ if y else 'nothing'}: expected a "
                "tensor or a tuple of tensors"
            )
        if any(each.is_complex() for each in y):
            raise source.problem(f"layer {number} returns complex numbers: expected real ones")
        found.append(one._replace(output=tuple(map(_shape, y))))
        x = tuple(_leaf(each) for each in y)
    return found


def _changed(layer: nn.Module, before: Mapping[str, int]) -> str | None:
    """A buffer that is not what it was before a forward."""
    for name, buffer in layer.named_buffers():
        if before.get(name) != buffer._version:
            return name
    return None


def _run(layer: nn.Module, x: tuple[Tensor, ...]) -> tuple[Any, Measured]:
    """The output of a layer, and its sizes without that."""
    storages: dict[Any, int] = {}
    weights = {p.untyped_storage()._cdata for p in (*layer.parameters(), *layer.buffers())}
    seen: dict[str, list[int]] = {"deferred": [], "queued": [], "columns": [], "rows": []}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    def hook(module: Linear, given: tuple[Tensor], y: Tensor) -> None:
        tokens = y.numel() // module.out_features
        seen["deferred"].append(2 * tokens * module.in_features * module.out_features)
        seen["queued"].append(given[0].nbytes + y.nbytes)
        if isinstance(module, ColumnLinear):
            seen["columns"].append(module.in_features)
        elif isinstance(module, RowLinear):
            seen["rows"].append(module.out_features)

    hooks = [m.register_forward_hook(hook) for m in layer.modules() if isinstance(m, Linear)]
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(pack, _same):
        y = layer(*x)
    for each in hooks:
        each.remove()
    return y, Measured(
        flops=counter.get_total_flops(),
        deferred=sum(seen["deferred"]),
        saved=sum(storages.values()),
        queued=sum(seen["queued"]),
        output=(),
        columns=tuple(seen["columns"]),
        rows=tuple(seen["rows"]),
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _shape(tensor: Tensor) -> TensorShape:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorShape(tuple(tensor.shape), name, tensor.nbytes, tensor.is_floating_point())
