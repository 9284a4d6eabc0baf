"""Bytes and calls of an operation of a stage, by the layers whose weights it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megapipe.context.entries import ScoreRect, attention_flops
from megapipe.layout.layout import DeviceKind
from megapipe.ops.storages import LiveStorages, tensors_in
from megapipe.plan.kernels import STAND_INS, WORKSPACES
from megapipe.plan.results import Results
from megapipe.plan.segments import Segment
from megapipe.plan.unit import Kernel, Transfer

_NO_KERNEL = re.compile(
    "_?(unsafe_)?(reshape_)?(view|alias)|reshape|t|transpose|permute|expand|select|slice|as_strided"
    "|(un)?squeeze|split(_with_sizes)?|unbind|chunk|narrow|(un)?flatten|unfold|detach|set_|resize_"
    "|lift_fresh|(new_)?empty(_like|_strided)?|record_stream|is_same_size"
)
"""Names of operations that only see or allocate memory."""


class Trace(LiveStorages):
    """Bytes alive, and the kernels and collectives in their order, on a device of a `kind`."""

    def __init__(self, kind: DeviceKind, cached: Callable[[], int], results: Results) -> None:
        super().__init__()
        self._stand_ins, self._workspaces = STAND_INS[kind], WORKSPACES[kind]
        self._cached, self._results = cached, results
        self._layers: dict[int, int] = {}
        self._calls: list[Kernel | Transfer] = []
        self._done: list[Segment] = []
        self._seen: set[int | None] = set()
        self._layer: int | None = None
        self._before = self._now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler only to tell it to leave this mode alone."""
        return False

    def belong(self, layer: int, tensors: Iterable[Tensor]) -> None:
        """Begin a segment where one of these `tensors` is first taken."""
        self._layers |= {tensor.untyped_storage()._cdata: layer for tensor in tensors}

    def begin(self) -> None:
        """Begin an operation."""
        self._done, self._seen = [], set()
        self._turn(None)

    def end(self) -> tuple[Segment, ...]:
        """Return the segments of the operation."""
        self._end_segment()
        return tuple(self._done)

    def _turn(self, layer: int | None) -> None:
        self._layer, self._before, self._calls, self.peak = layer, self._now(), [], self.bytes
        self._seen.add(layer)

    def _now(self) -> tuple[int, int, int]:
        return self.bytes, sum(self.host_sizes), self._cached()

    def _end_segment(self) -> None:
        changes = (now - before for now, before in zip(self._now(), self._before, strict=True))
        device, host, cached = changes
        self._done.append(
            Segment(
                layer=self._layer,
                peak=self.peak - self._before[0],
                device=device,
                host=host,
                cached=cached,
                calls=tuple(self._calls),
            )
        )

    def note(self, call: Kernel | Transfer) -> None:
        """Add a call to the operation."""
        self._calls.append(call)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in given:
            layer = self._layers.get(tensor.untyped_storage()._cdata)
            if layer is not None and layer not in self._seen:
                self._end_segment()
                self._turn(layer)
        run = self._stand_ins.get(func, func)
        out = self._results.call(run, args, kwargs or {}, given)
        self.count(run, out)
        if func in self._workspaces:
            inside = self._workspaces[func](*args, **kwargs or {})
            self.peak = max(self.peak, self.bytes + inside)
        if func.namespace != "prim" and not _NO_KERNEL.fullmatch(func._overloadpacket.__name__):
            self.note(_kernel(func, args, kwargs or {}, given, out))
        return out


def _kernel(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], out: Any
) -> Kernel:
    packet = func._overloadpacket
    product = _product(packet.__name__, args)
    flops = 0
    if product is not None:
        flops = 2 * prod(product)
    elif "attention" in packet.__name__:
        flops = _attention_flops(func, args, kwargs)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    return Kernel(
        name=packet.__name__,
        flops=flops,
        read=sum(map(_bytes, given)),
        written=sum(map(_bytes, tensors_in(out))),
        product=product,
    )


def _product(name: str, args: Sequence[Any]) -> tuple[int, int, int] | None:
    """m, n and k; torch counts no products that are added in place, nor those of groups of rows."""
    if name in ("mm", "_grouped_mm"):
        left, right = args[:2]
    elif name in ("addmm", "addmm_"):
        left, right = args[1:3]
    else:
        return None
    return int(left.shape[0]), int(right.shape[-1]), int(left.shape[1])


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the FLOPs of the scores that a causal mask leaves."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    q, k = given["query"], given["key"]
    heads, (s, t) = prod(q.shape[:-2]), (q.shape[-2], k.shape[-2])
    if q.dim() == 3:  # rows of sequences after each other, [rows, heads, d]
        heads, (s, t) = q.shape[1] * (len(given["cum_seq_q"]) - 1), (given["max_q"], given["max_k"])
    computed = ScoreRect(slice(0, s), slice(0, t), given.get("is_causal", False)).scores
    backward = "backward" in func._overloadpacket.__name__
    return int(attention_flops(heads * computed, q.shape[-1], backward=backward))


def _bytes(tensor: Tensor) -> int:
    """Count bytes that a kernel reads of a tensor: what is broadcast, once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride)
