"""A stage of a layout, run on torch's meta device: what it allocates, computes and sends.

The very modules, engine and collectives of a training run, with tensors that have no values, on a
mesh of which no other rank exists. Experts are chosen in turn, so that all get equally many rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megapipe.assembly.context import make_context
from megapipe.assembly.expert_places import make_places
from megapipe.assembly.sharding import make_sharding
from megapipe.assembly.stage import make_stage
from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import Coordinates, Grid
from megapipe.distributed.planned import Collective, PlannedMesh
from megapipe.layers.expert_rows import Counts, count_rows
from megapipe.layers.experts import Experts, expert_layers
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layout.layout import DeviceKind, Layout
from megapipe.model.interface import Message, StageModule
from megapipe.model.modules.fused_attention import fused_attention
from megapipe.model.partition import StageSpec
from megapipe.ops.documents import Documents
from megapipe.ops.kernels import Kernels
from megapipe.ops.storages import LiveStorages
from megapipe.plan.kernels import STAND_INS, WORKSPACES, planned_kernels
from megapipe.plan.segments import Measured, Part, Segment, Short, Slice, shortened, units_of
from megapipe.plan.unit import Kernel, Operation, Transfer, Unit
from megapipe.plan.units import part_of

_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_META = torch.device("meta")
_NO_KERNEL = re.compile(
    "_?(unsafe_)?(reshape_)?(view|alias)|reshape|t|transpose|permute|expand|select|slice|as_strided"
    "|(un)?squeeze|split(_with_sizes)?|unbind|chunk|narrow|(un)?flatten|unfold|detach|set_|resize_"
    "|lift_fresh|(new_)?empty(_like|_strided)?|record_stream|is_same_size"
)
"""Names of operations that only see or allocate memory."""


def measure(
    config: Config,
    layout: Layout,
    stage: int,
    *,
    rows: int | None = None,
    at: Coordinates | None = None,
    kernels: Kernels | None = None,
    imbalance: Fraction | None = None,
    shorten: bool = True,
) -> list[Unit]:
    """Run a stage on one micro-batch, one unit for each slice of its sequences.

    `rows` samples, by default a whole micro-batch. `at`: the rank of a pipeline index that runs it,
    by default the first. `kernels`: by default those of the layout's device. The experts of this
    rank get `imbalance` times the mean rows of a rank. Without `shorten` all of its layers run.
    """
    part = part_of(layout, stage)
    kinds = [layout.model.kind(layer) for layer in range(layout.model.layers)]
    short = shortened(part, kinds) if shorten else Short(part, ())
    rows = rows or config.train.microbatch
    return units_of(
        run_part(config, layout, short.part, rows, at=at, kernels=kernels, imbalance=imbalance),
        short,
    )


def run_part(
    config: Config,
    layout: Layout,
    part: Part,
    rows: int,
    *,
    at: Coordinates | None = None,
    kernels: Kernels | None = None,
    imbalance: Fraction | None = None,
) -> Measured:
    """Run a part of a stage as :func:`measure` runs a stage."""
    at = at or Coordinates(0, 0, 0, 0)
    return _Run(config, layout, part, rows, at, kernels, imbalance).measured()


class _Trace(LiveStorages):
    """Bytes alive, and the kernels and collectives in their order, on a device of a `kind`."""

    def __init__(self, kind: DeviceKind, cached: Callable[[], int]) -> None:
        super().__init__()
        self._stand_ins, self._workspaces = STAND_INS[kind], WORKSPACES[kind]
        self._cached = cached
        self._layers: dict[int, int] = {}
        self._calls: list[Kernel | Transfer] = []
        self._done: list[Segment] = []
        self._seen: set[int | None] = set()
        self._layer: int | None = None
        self._before = self._now()

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
        self._calls.append(call)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            layer = self._layers.get(tensor.untyped_storage()._cdata)
            if layer is not None and layer not in self._seen:
                self._end_segment()
                self._turn(layer)
        run = self._stand_ins.get(func, func)
        out = super().__torch_dispatch__(run, types, args, kwargs)
        if func in self._workspaces:
            inside = self._workspaces[func](*args, **kwargs or {})
            self.peak = max(self.peak, self.bytes + inside)
        if func.namespace != "prim" and not _NO_KERNEL.fullmatch(func._overloadpacket.__name__):
            self.note(_kernel(func, args, kwargs or {}, out))
        return out


class _Run:
    """A stage of a layout on the meta device."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        part: Part,
        rows: int,
        at: Coordinates,
        kernels: Kernels | None,
        imbalance: Fraction | None,
    ) -> None:
        self.config, self.layout, self.part, self.rows = config, layout, part, rows
        grid = _grid(layout)
        backend = config.parallel.backend
        if backend == "auto":
            backend = "nccl" if layout.device == "cuda" else "gloo"
        self.mesh = PlannedMesh(grid, grid.rank_of(at), backend, self._transfer)
        kernels = kernels or planned_kernels(config, layout)
        if kernels.blocks is not None:
            context = make_context(layout, self.mesh, kernels.blocks, kernels.packed)
            kernels = replace(kernels, context=context)
        with _META:
            sharding = make_sharding(config, self.mesh, kernels)
            self.module = _built(layout.model.build(part.spec, sharding))
            _fill_slots(config, self.module)
            for layer in expert_layers(self.module):
                count = _EvenCounts(layer, rows, config.train.sequence_length, imbalance)
                form = replace(layer.sharding.form, count=count)
                layer.sharding = replace(layer.sharding, form=form)
            self.stage = make_stage(layout, self.module, part.spans, recompute=part.recompute)
        self.stage.own_autograd_parameters()
        self.trace = _Trace(layout.device, self.stage.cached_bytes)
        self._mark_layers()

    def measured(self) -> Measured:
        """Run it three times: once for what stays, such as tables of positions."""
        with _META, fused_attention():
            self._walk()
            self.trace.know(_lasting(self.module))
            split, fused = self._walk(), self._walk(fused=True)
        lengths = self.layout.local_lengths
        shapes = (self._message(self.part.spec, n, gradient=True) for n in lengths)
        sizes = (sum(prod(size) * kind.itemsize for size, kind in each) for each in shapes)
        found = (
            Slice(passes={**own, "B": other["B"]}, gradient=gradient)
            for own, other, gradient in zip(split, fused, sizes, strict=True)
        )
        return Measured(slices=tuple(found), compiled=self.config.kernels.compile)

    def _mark_layers(self) -> None:
        """Tell the trace which weights and main gradients are of which layer."""
        model, spec = self.layout.model, self.part.spec
        places = [
            (layer, StageSpec(False, range(layer, layer + 1), False)) for layer in spec.layers
        ]
        places.append((model.layers, replace(spec, layers=range(0))))
        of = {each.name: layer for layer, stage in places for each in model.parameters(stage)}
        for parameter in self.module.parameters():
            own = spec_of(parameter)
            tensors = [parameter.data] if own.frozen else [parameter.data, main_grad(parameter)]
            self.trace.belong(of[own.name], tensors)

    def _walk(self, *, fused: bool = False) -> list[dict[Operation, tuple[Segment, ...]]]:
        """Run F of all slices, then the backward of each in descending order."""
        stage, trace, part = self.stage, self.trace, self.part
        lengths = self.layout.local_lengths
        stage.begin(train=True)
        batches = list(self._microbatches())
        inputs = [self._message(self._before(), n) for n in lengths]
        gradients = [self._message(part.spec, n, gradient=True) for n in lengths]
        trace.know(tensor for mb in batches for tensor in _given(mb))
        found: list[dict[Operation, tuple[Segment, ...]]] = []
        for j, mb in enumerate(batches):
            found.append({})
            with self._operation(found[j], "F"):
                y = stage.forward((0, j), self._received(inputs[j]), mb)
                del y
        for j in reversed(range(len(batches))):
            if part.recompute:
                with self._operation(found[j], "R"):
                    stage.recompute_ahead((0, j))
            with self._operation(found[j], "B" if fused else "I"):
                run = stage.backward if fused else stage.input_grad
                x = run((0, j), self._received(gradients[j]))
                del x
            if not fused:
                with self._operation(found[j], "W"):
                    stage.weight_grad((0, j))
        return found

    @contextmanager
    def _operation(
        self, found: dict[Operation, tuple[Segment, ...]], what: Operation
    ) -> Iterator[None]:
        """Trace an operation."""
        self.trace.begin()
        with self.trace:
            yield
        found[what] = self.trace.end()

    def _microbatches(self) -> Iterator[MicroBatch]:
        layout, mesh = self.layout, self.mesh
        start, lengths, sources = 0, layout.local_lengths, len(self.config.data.mixture)
        held = None
        if layout.split.cp > 1:
            held = layout.split.held(layout.slice_lengths, mesh.cp.index)
        loads: dict[int, Tensor] = {}
        for length in lengths:
            shape = (self.rows, length)
            ids = torch.empty(shape, dtype=torch.int64)
            yield MicroBatch(
                index=0,
                step=0,
                seed=0,
                tokens=ids,
                labels=ids,
                mask=torch.empty(shape, dtype=torch.uint8 if sources else torch.bool),
                documents=self._documents((start + length) * layout.cp),
                by_source=torch.empty(sources, dtype=torch.float64) if sources else None,
                start=start,
                held=held,
                positions=ids.t() if self.config.resets_positions else None,
                sequence_length=sum(lengths) if len(lengths) > 1 else None,
                earlier={} if len(lengths) > 1 else None,
                loads=loads,
            )
            start += length

    def _documents(self, length: int) -> Documents | None:
        """One document a sequence, of its positions so far, those on other ranks included."""
        if not self.config.data.masks_documents:
            return None
        ids = torch.zeros(self.rows, length, dtype=torch.int64, device="cpu")
        return Documents(ids, _META)

    def _before(self) -> StageSpec | None:
        """All that comes before the part; None at the model's input."""
        spec, model = self.part.spec, self.layout.model
        if spec.embedding or not (spec.layers.start or model.ends):
            return None
        return StageSpec(model.ends, range(spec.layers.start), head=False)

    def _message(self, spec: StageSpec | None, length: int, *, gradient: bool = False) -> _Shapes:
        """Shapes and types of what units send to those after them, or of its gradient; none beyond
        the ends."""
        model = self.layout.model
        if spec is None or spec.head or (not model.ends and spec.layers.stop == model.layers):
            return ()
        tensors = model.message(spec, self.rows, length)
        sent = (each for each in tensors if each.has_grad or not gradient)
        return tuple((each.shape, getattr(torch, each.dtype)) for each in sent)

    def _received(self, shapes: _Shapes) -> Message:
        """Allocate a message that has just come in."""
        tensors = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
        if not self.layout.sends_tuples:
            return tensors[0] if tensors else None
        return tensors or None

    def _transfer(self, seen: Collective) -> None:
        grid, rank = self.mesh.grid, self.mesh.rank
        axis = "ep"
        if set(seen.ranks) <= set(grid.peers(rank, "tp")):
            axis = "tp"
        elif set(seen.ranks) <= set(grid.peers(rank, "cp")):
            axis = "cp"
        span = seen.ranks[-1] - seen.ranks[0] + 1
        self.trace.note(
            Transfer(
                kind=seen.kind, axis=axis, members=len(seen.ranks), span=span, bytes=seen.bytes
            )
        )


def _grid(layout: Layout) -> Grid:
    """The ranks of a pipeline index."""
    return Grid(
        pp=1,
        dp=layout.dp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        node=layout.node,
    )


def _built(module: StageModule) -> StageModule:
    """Give the parameters of a stage main gradients, but for frozen ones."""
    for parameter in module.parameters():
        parameter.requires_grad_(not spec_of(parameter).frozen)
        if parameter.requires_grad:
            high = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.empty_like(parameter, dtype=high, requires_grad=False)
    return module


def _fill_slots(config: Config, module: StageModule) -> None:
    """Give layers with experts places, with a copy in each slot, where experts move."""
    for places in make_places(config, {0: module}).get(0, ()):
        places.take(places.present.filled())


def _lasting(module: Any) -> Iterator[Tensor]:
    """Yield tensors that are there without a micro-batch."""
    for parameter in module.parameters():
        yield parameter.data
        if not spec_of(parameter).frozen:
            yield main_grad(parameter)
    yield from module.buffers()
    if hasattr(module, "constants"):
        yield from module.constants()
    for layer in expert_layers(module):
        if layer.places is not None:
            yield from layer.places.tensors()


def _given(mb: MicroBatch) -> Iterator[Tensor]:
    for tensor in (mb.tokens, mb.labels, mb.mask, mb.positions, mb.by_source):
        if tensor is not None:
            yield tensor


class _EvenCounts:
    """Counts rows as :func:`count_rows` would where tokens choose the experts of a layer in turn;
    those of this rank get `imbalance` times as many, without it as many as their capacity allows,
    where they have one. They are known to the host, which has nothing to wait for. All go to the
    ranks that own the experts, and none to copies.
    """

    def __init__(self, layer: Experts, rows: int, length: int, imbalance: Fraction | None) -> None:
        self.layer, self.rows, self.length = layer, rows, length
        self.more = imbalance

    def __call__(self, choice: Tensor, places: int, ep: Axis) -> Counts:
        counted = count_rows(choice, places, ep)
        ranks = max(1, ep.size // self.layer.sharding.etp)
        experts, on_each = self.layer.routing.experts, places // ranks
        owned = experts // ranks
        all_own = Fraction(choice.numel(), owned)
        more = 1 if self.more is None or ranks == 1 else self.more
        of_own = min(choice.numel() * more / experts, all_own)
        if self.more is None and self.layer.routing.places(self.length) is not None:
            of_own = all_own
        others = (choice.numel() - of_own * owned) / max(1, experts - owned)
        known = []
        for place in range(places):
            rank, number = divmod(place, on_each)
            own = rank == ep.index // self.layer.sharding.etp
            known.append(self._bounded(of_own if own else others) * (number < owned))
        return Counts([known] * ep.size, counted.there)

    def _bounded(self, rows: Fraction | float) -> int:
        """Rows of an expert as far as it takes them."""
        most = self.layer.routing.places(self.length)
        if most is None:
            return int(rows)
        return min(int(rows), -(-self.rows * most // self.layer.sharding.sequence.size))


def _kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Kernel:
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
        read=sum(map(_bytes, _tensors((args, kwargs)))),
        written=sum(map(_bytes, _tensors(out))),
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
    """FLOPs of the scores that a causal mask leaves: two products forward, five backward."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    q, k = given["query"], given["key"]
    heads, (s, t) = prod(q.shape[:-2]), (q.shape[-2], k.shape[-2])
    if q.dim() == 3:  # rows of sequences after each other, [rows, heads, d]
        heads, (s, t) = q.shape[1] * (len(given["cum_seq_q"]) - 1), (given["max_q"], given["max_k"])
    scores = s * (s + 1) // 2 if given.get("is_causal", False) else s * t
    products = 5 if "backward" in func._overloadpacket.__name__ else 2
    return int(2 * products * heads * scores * q.shape[-1])


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _bytes(tensor: Tensor) -> int:
    """Count bytes that a kernel reads of a tensor: what is broadcast, once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride)
