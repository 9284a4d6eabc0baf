"""Bytes and calls of an operation of a stage, recorded in segments by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megapipe.context.score_rects import ScoreRect, attention_flops
from megapipe.errors import ConfigError
from megapipe.layout.layout import DeviceKind
from megapipe.ops.live_storages import LiveStorages, tensors_in
from megapipe.plan.kernels import STAND_INS, WORKSPACES
from megapipe.plan.results import Results
from megapipe.plan.segments import Segment
from megapipe.plan.unit import Kernel, Transfer

_NO_KERNEL = re.compile(
    "_?(unsafe_)?(reshape_)?(view|alias)|reshape|t|transpose|permute|expand|select|slice|as_strided"
    "|(un)?squeeze|split(_with_sizes)?|unbind|chunk|narrow|(un)?flatten|unfold|detach|set_|resize_"
    "|lift_fresh|(new_)?empty(_like|_strided)?|record_stream|is_same_size"
)
"""Names of torch operations that run no kernel: they only view or allocate memory."""
MOST_CALLS = 2**17
"""Maximum number of kernels and collectives in an operation; they take about 20 s to record."""


class Trace(LiveStorages):
    """Recorder of live bytes, kernels and collectives, on a planned device of a `kind`."""

    def __init__(self, kind: DeviceKind, cached: Callable[[], int], results: Results) -> None:
        super().__init__()
        self._stand_ins, self._workspaces = STAND_INS[kind], WORKSPACES[kind]
        self._cached, self._results = cached, results
        self._layers: dict[int, int] = {}
        self._calls: list[Kernel | Transfer] = []
        self._count = 0
        self._done: list[Segment] = []
        self._seen: set[int | None] = set()
        self._layer: int | None = None
        self._before = self._now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not load its compiler to exclude this mode from it."""
        return False

    def belong(self, layer: int, tensors: Iterable[Tensor]) -> None:
        """Assign `tensors` to a layer: their first use in an operation begins a segment."""
        self._layers |= {tensor.untyped_storage()._cdata: layer for tensor in tensors}

    def begin(self) -> None:
        """Begin recording an operation."""
        self._done, self._seen, self._count = [], set(), 0
        self._turn(None)

    def end(self) -> tuple[Segment, ...]:
        """End the operation, and return its segments."""
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
        """Add a call to the current segment.

        Raises:
            ConfigError: the operation has more than :data:`MOST_CALLS`.
        """
        self._calls.append(call)
        self._count += 1
        if self._count > MOST_CALLS:
            raise ConfigError(
                f"a stage runs more than {MOST_CALLS:,} kernels for a micro-batch, too many for a "
                "plan: use a smaller train.microbatch or larger kernels.loss_chunk_tokens"
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in inputs:
            layer = self._layers.get(tensor.untyped_storage()._cdata)
            if layer is not None and layer not in self._seen:
                self._end_segment()
                self._turn(layer)
        run = self._stand_ins.get(func, func)
        out = self._results.call(run, args, kwargs or {}, inputs)
        self.count(run, out)
        if func in self._workspaces:
            inside = self._workspaces[func](*args, **kwargs or {})
            self.peak = max(self.peak, self.bytes + inside)
        if func.namespace != "prim" and not _NO_KERNEL.fullmatch(func._overloadpacket.__name__):
            self.note(_kernel(func, args, kwargs or {}, inputs, out))
        return out


def _kernel(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor], out: Any
) -> Kernel:
    packet = func._overloadpacket
    name = packet.__name__
    product, batch = _product(name, args)
    flops = 0
    if product is not None:
        flops = 2 * batch * prod(product)
    elif "attention" in name:
        flops, product, batch = _attention(func, args, kwargs)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    read, written = sum(map(_bytes, inputs)), sum(map(_bytes, tensors_in(out)))
    if name in _ROWS_OF:
        read, written = _touched(name, args, written)
    return Kernel(
        name=name,
        flops=flops,
        read=read,
        written=written,
        dtype=_dtype(inputs),
        product=product,
        batch=batch,
    )


_ROWS_OF = {
    "embedding": 1,
    "index_select": 2,
    "index": 1,
    "gather": 2,
    "index_add_": 2,
    "scatter_add_": 2,
}
"""Operations that touch some rows of a matrix, with the position of the argument that has their
indices."""


def _touched(name: str, args: Sequence[Any], written: int) -> tuple[int, int]:
    """Return the bytes read and written by an operation on rows: not those of the whole matrix."""
    indices = sum(map(_bytes, tensors_in(args[_ROWS_OF[name]])))
    if name in ("index_add_", "scatter_add_"):
        source = _bytes(args[3])
        rows = source // args[3].element_size() * args[0].element_size()
        return source + rows + indices, rows
    return written + indices, written


def _dtype(inputs: Iterable[Tensor]) -> str:
    """Return the narrowest type of the inputs: a product of bf16 may be added to an fp32 sum."""
    types = {x.dtype for x in inputs if x.is_floating_point()}
    narrowest = min(types, key=lambda each: each.itemsize, default=torch.float32)
    return str(narrowest).removeprefix("torch.")


def _product(name: str, args: Sequence[Any]) -> tuple[tuple[int, int, int] | None, int]:
    """Return (m, n, k) of a matrix product and the number of products; (None, 1) for another
    operation. torch's own counter lacks in-place and grouped products."""
    if name in ("mm", "bmm", "_grouped_mm"):
        left, right = args[:2]
    elif name in ("addmm", "addmm_", "baddbmm", "baddbmm_"):
        left, right = args[1:3]
    else:
        return None, 1
    batch = int(left.shape[0]) if "bmm" in name else 1
    return (int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1])), batch


def _attention(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, tuple[int, int, int], int]:
    """Return the FLOPs of attention, without scores that a causal mask hides; the numbers of
    queries and keys of a head, and its width; and the number of heads."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    q, k = arguments["query"], arguments["key"]
    heads, (s, t) = prod(q.shape[:-2]), (q.shape[-2], k.shape[-2])
    if q.dim() == 3:  # sequences one after the other, [rows, heads, d]
        heads, (s, t) = (
            q.shape[1] * (len(arguments["cum_seq_q"]) - 1),
            (arguments["max_q"], arguments["max_k"]),
        )
    computed = ScoreRect(slice(0, s), slice(0, t), arguments.get("is_causal", False)).scores
    backward = "backward" in func._overloadpacket.__name__
    flops = int(attention_flops(heads * computed, q.shape[-1], backward=backward))
    return flops, (int(s), int(t), int(q.shape[-1])), int(heads)


def _bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor that a kernel reads; a broadcast value counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride)
