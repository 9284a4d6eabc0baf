"""Measures user-defined layers by running them on torch's meta device.

The meta device computes nothing, but it knows shapes, FLOPs and the tensors that autograd saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layers.user_linear import Linear
from megapipe.model.interface import Loss, TensorShape
from megapipe.model.modules.fused_attention import SDPA_FLOPS, fused_attention
from megapipe.model.modules.tp_dataflow import ShardDataflowCheck, one_rank
from megapipe.model.modules.units import LayerSource
from megapipe.util.dtypes import Dtype
from megapipe.util.user_code import FAILURES


class Measured(NamedTuple):
    """Measured sizes of one layer for a micro-batch, on one tensor-parallel rank."""

    flops: int
    """FLOPs of the forward."""
    backward: int
    """FLOPs of the backward."""
    deferred: int
    """Part of `backward` in weight gradients that are deferred to ``W``."""
    output: tuple[TensorShape, ...]


def measure(
    source: LayerSource,
    layers: Sequence[nn.Module],
    deferred: Collection[Linear],
    partial: Collection[Parameter],
    loss: Loss,
    tokens: tuple[int, int],
    dtype: Dtype,
    tp: int,
) -> list[Measured]:
    """Measure each layer on one of `tp` ranks by running it on the meta device.

    `tokens`: number of sequences, and their length. `deferred`: linear layers with deferred weight
    gradients; frozen weights, which need no gradient, have none. `partial`: parameters between
    split layers whose gradients are summed over tp. Raises :class:`ConfigError` if a layer fails on
    the meta device, returns anything but tensors, or would be wrong on several ranks, or if `loss`
    returns no scalar.
    """
    x: Any = (torch.empty(tokens, dtype=torch.int64, device="meta"),)
    found = []
    for number, layer in enumerate(layers):
        layer.to("meta")
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(TORCH_DTYPES[dtype])
        before = _buffers(layer)
        own = [m for m in layer.modules() if isinstance(m, Linear) and m in deferred]
        with one_rank(own, tp):
            y, one = _run(source, number, layer, own, partial, x, tp)
        if changed := before ^ _buffers(layer):
            name = min(name for name, *_ in changed)
            raise source.problem(
                f"{source.label(number)} changes its buffer {name} while it runs, and buffers are "
                "not saved: expected layers with parameters as their only state (LayerNorm, not "
                "BatchNorm)"
            )
        if any(each.is_complex() for each in y):
            raise source.problem(
                f"{source.label(number)} returns complex numbers: expected real ones"
            )
        found.append(one._replace(output=tuple(map(_shape, y))))
        x = tuple(_leaf(each) for each in y)
    _check_loss(loss, x if len(x) > 1 else x[0], tokens)
    return found


def _check_loss(loss: Loss, y: Any, tokens: tuple[int, int]) -> None:
    """Check that a loss returns a scalar; a loss that needs values is not checked."""
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    mask = torch.empty(tokens, dtype=torch.bool, device="meta")
    with suppress(RuntimeError):  # torch raises it if values are needed
        loss(y, labels, mask)


class _OneType(TorchDispatchMode):
    """Mode that refuses mixed number types in one operation. Only the meta device accepts them."""

    _PRODUCTS = frozenset(
        getattr(torch.ops.aten, name).default
        for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
    )
    _NORM = torch.ops.aten.native_layer_norm.default
    """Operation that accepts weights of a wider type than its input."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in self._PRODUCTS or function == self._NORM:
            tensors = (each for each in args if isinstance(each, torch.Tensor))
            kinds = [each.dtype for each in tensors if each.is_floating_point()]
            widened = function == self._NORM and kinds[0].itemsize <= kinds[-1].itemsize
            if len({*kinds}) > 1 and not widened:
                names = sorted(str(kind).removeprefix("torch.") for kind in {*kinds})
                what = "norm" if function == self._NORM else "product"
                raise RuntimeError(f"a {what} of {' and '.join(names)}")
        return function(*args, **(kwargs or {}))


def _wide(layer: nn.Module) -> str:
    """Return a hint for the error if a buffer has another type than the weights."""
    kinds = {p.dtype for p in layer.parameters() if p.is_floating_point()}
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point() and kinds and buffer.dtype not in kinds:
            kind = str(buffer.dtype).removeprefix("torch.")
            return (
                f" (its buffer {name} keeps the {kind} in which it was made: what is computed with "
                "it may need .to(x.dtype))"
            )
    return ""


def _buffers(layer: nn.Module) -> set[tuple[str, Tensor, int]]:
    """Return a layer's buffers, each with the number of times that it was written to."""
    return {(name, buffer, buffer._version) for name, buffer in layer.named_buffers()}


def _run(
    source: LayerSource,
    number: int,
    layer: nn.Module,
    own: Sequence[Linear],
    partial: Collection[Parameter],
    x: tuple[Tensor, ...],
    tp: int,
) -> tuple[tuple[Tensor, ...], Measured]:
    """Run a layer; return its output, and its measured sizes without those of the output."""
    shares = ShardDataflowCheck(layer, own, partial, tp)
    counter = FlopCounterMode(display=False, custom_mapping=SDPA_FLOPS)
    one_type, fused = _OneType(), fused_attention()
    with _hooked(own, shares) as deferred, one_type, counter, fused, shares:
        try:
            y = layer(*x)
        except FAILURES as error:  # whatever user code raises
            on = f" of one of parallel.tp={tp} ranks" if tp > 1 else ""
            text = " ".join(f"{type(error).__name__}: {error}".split())
            problem = shares.problem or f"fails on the meta device{on}: {text}{_wide(layer)}"
            raise source.problem(f"{source.label(number)}: {problem}") from error
    y = y if isinstance(y, tuple) else (y,)
    if not y or not all(isinstance(each, Tensor) for each in y):
        raise source.problem(
            f"{source.label(number)} returns {type(y[0]).__name__ if y else 'nothing'}: expected a "
            "tensor or a tuple of tensors"
        )
    if elsewhere := {each.device.type for each in y} - {"meta"}:
        raise source.problem(
            f"{source.label(number)} returns a tensor on the {elsewhere.pop()} whatever it is "
            "given: expected device=x.device where it makes one"
        )
    shares.end(y)
    if shares.problem is not None:
        raise source.problem(f"{source.label(number)}: {shares.problem}")
    flops = counter.get_total_flops()
    is_partly_frozen = not all(parameter.requires_grad for parameter in layer.parameters())
    return y, Measured(
        flops=flops,
        backward=_backward_flops(y) if is_partly_frozen else 2 * flops,
        deferred=sum(deferred),
        output=(),
    )


def _backward_flops(outputs: Sequence[Tensor]) -> int:
    """Return the FLOPs of the backward, run on the meta device."""
    trained = [each for each in outputs if each.requires_grad]
    counter = FlopCounterMode(display=False, custom_mapping=SDPA_FLOPS)
    if trained:
        with counter:
            torch.autograd.backward(trained, [torch.empty_like(each) for each in trained])
    return counter.get_total_flops()


@contextmanager
def _hooked(modules: Sequence[Linear], shares: ShardDataflowCheck) -> Iterator[list[int]]:
    """Within the context, count FLOPs of weight gradients that are deferred, and report the
    forwards of linear layers to `shares`."""
    deferred: list[int] = []

    def before(module: Any, args: Any) -> None:
        shares.enter(module)

    def after(module: Any, args: tuple[Tensor], y: Tensor) -> None:
        shares.leave(module, args[0], y)
        if module.weight.requires_grad:
            deferred.append(2 * y.numel() * args[0].shape[-1])

    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    try:
        yield deferred
    finally:
        for each in hooks:
            each.remove()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _shape(tensor: Tensor) -> TensorShape:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorShape(tuple(tensor.shape), name, tensor.nbytes, tensor.is_floating_point())
