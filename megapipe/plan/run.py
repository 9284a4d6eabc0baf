"""Runs stages on torch's meta device, to measure what they allocate, compute and send.

Modules, engine and collectives are those of a training run. Tensors have no values, and the mesh
has no other processes. Tokens choose experts in turn, so experts get equally many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megapipe.assembly.context import make_context
from megapipe.assembly.moe.replicas import attach_expert_replicas
from megapipe.assembly.sharding import make_sharding
from megapipe.assembly.stage import make_stage
from megapipe.config.config import Config
from megapipe.context.packs import most_together
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import Grid, MeshCoordinates
from megapipe.distributed.planned import Collective, PlannedMesh
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.experts import RoutedExperts, expert_layers
from megapipe.layers.moe.permutation import ExpertCounts, count_rows
from megapipe.layers.parameter import spec_of
from megapipe.layers.scratch import Scratch
from megapipe.layers.weight_grad import main_grad
from megapipe.layout.layout import Layout
from megapipe.model.interface import Loss, Message, StageModule
from megapipe.model.modules.fused_attention import fused_attention
from megapipe.model.partition import StageSpec
from megapipe.ops.documents import Documents
from megapipe.ops.kernels import Kernels
from megapipe.plan.kernels import planned_kernels
from megapipe.plan.results import Results
from megapipe.plan.segments import (
    Measured,
    Part,
    Segment,
    Short,
    Slice,
    part_of,
    shortened,
    units_of,
)
from megapipe.plan.trace import Trace
from megapipe.plan.unit import TWO_HOPS, Operation, Transfer, Unit
from megapipe.util.user_code import FAILURES

_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_Walked = list[dict[Operation, tuple[Segment, ...]]]
"""Segments of each operation, for each slice of the sequences."""
_META = torch.device("meta")


def measure(
    config: Config,
    layout: Layout,
    stage: int,
    *,
    rows: int | None = None,
    at: MeshCoordinates | None = None,
    kernels: Kernels | None = None,
    imbalance: Fraction | None = None,
    shorten: bool = True,
) -> list[Unit]:
    """Run a stage on one micro-batch; return the costs of each slice of its sequences.

    `rows`: number of samples; default: a whole micro-batch. `at`: mesh coordinates of the rank;
    default: the first rank. `kernels`: by default those of the layout's device. `imbalance`: rows
    of the rank's experts relative to the mean. Unless `shorten`, every layer of the stage runs.
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
    at: MeshCoordinates | None = None,
    kernels: Kernels | None = None,
    imbalance: Fraction | None = None,
    results: Results | None = None,
) -> Measured:
    """Run some layers of a stage, with the arguments of :func:`measure`. `results`: cache of
    operations' results, which the run uses and extends."""
    at, results = at or MeshCoordinates(0, 0, 0, 0), results or Results()
    return _Run(config, layout, part, rows, at, kernels, imbalance, results).measured()


class _Run:
    """Runner of some layers of a stage on the meta device."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        part: Part,
        rows: int,
        at: MeshCoordinates,
        kernels: Kernels | None,
        imbalance: Fraction | None,
        results: Results,
    ) -> None:
        self.config, self.layout, self.part, self.rows = config, layout, part, rows
        self.document = config.train.sequence_length
        """Length of each document, in positions."""
        grid = _grid(layout)
        backend = config.parallel.backend
        if backend == "auto":
            backend = "nccl" if layout.device == "cuda" else "gloo"
        self.mesh = PlannedMesh(grid, grid.rank_of(at), backend, self._transfer)
        kernels = kernels or planned_kernels(config, layout)
        self.packs = config.data.masks_documents and kernels.packed_attention_tile is not None
        if kernels.attention_tile is not None:
            context = make_context(
                layout, self.mesh, kernels.attention_tile, kernels.packed_attention_tile
            )
            kernels = replace(kernels, context=context)
        with _META:
            sharding = make_sharding(config, self.mesh, kernels)
            self.module = _built(layout.model.build(part.spec, sharding))
            if config.train.loss_function is not None:
                own: Any = self.module
                own.loss = _WithoutValues(own.loss)
            _fill_slots(config, self.module)
            for layer in expert_layers(self.module):
                count = _EvenCounts(layer, rows, config.train.sequence_length, imbalance)
                layer.dispatcher = replace(layer.dispatcher, count=count)
            self.stage = make_stage(layout, self.module, part.spans, recompute=part.recompute)
        self.stage.route_autograd_grads()
        self.trace = Trace(layout.device, self.stage.cached_bytes, results)
        self._mark_layers()

    def measured(self) -> Measured:
        """Run F, I, W, and then F, B. A forward before them creates tensors that stay in memory,
        e.g. position tables."""
        with _META, fused_attention():
            self._walk(backward=False)
            self.trace.know(_lasting(self.module))
            split, fused = self._walk(), self._walk(fused=True)
            if self.packs:
                self.document = self._packed_best()
                split, fused = _most(split, self._walk()), _most(fused, self._walk(fused=True))
        lengths = self.layout.local_lengths
        shapes = (self._message(self.part.spec, n, gradient=True) for n in lengths)
        sizes = (sum(prod(size) * kind.itemsize for size, kind in each) for each in shapes)
        found = (
            Slice(passes={**own, "B": other["B"]}, gradient=gradient)
            for own, other, gradient in zip(split, fused, sizes, strict=True)
        )
        return Measured(slices=tuple(found), compiled=self.config.kernels.compile)

    def _mark_layers(self) -> None:
        """Tell the trace to which layer each weight and main gradient belongs."""
        model, spec = self.layout.model, self.part.spec
        specs = [(layer, StageSpec(False, range(layer, layer + 1), False)) for layer in spec.layers]
        specs.append((model.layers, replace(spec, layers=range(0))))
        of = {each.name: layer for layer, stage in specs for each in model.parameters(stage)}
        for parameter in self.module.parameters():
            own = spec_of(parameter)
            tensors = [parameter.data] if own.frozen else [parameter.data, main_grad(parameter)]
            self.trace.belong(of[own.name], tensors)

    def _walk(self, *, fused: bool = False, backward: bool = True) -> _Walked:
        """Run F of all slices, then B (`fused`) or I and W of each slice in descending order."""
        stage, trace, part = self.stage, self.trace, self.part
        lengths = self.layout.local_lengths
        stage.begin(train=True)
        batches = list(self._microbatches())
        inputs = [self._message(self._before(), n) for n in lengths]
        gradients = [self._message(part.spec, n, gradient=True) for n in lengths]
        trace.know(tensor for mb in batches for tensor in _given(mb))
        found: _Walked = []
        for j, mb in enumerate(batches):
            found.append({})
            with self._operation(found[j], "F"):
                y = stage.forward((0, j), self._received(inputs[j]), mb)
                del y
        for j in reversed(range(len(batches) if backward else 0)):
            if part.recompute:
                with self._operation(found[j], "R"):
                    stage.recompute((0, j))
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
        """Trace what runs within the context as operation `what`."""
        self.trace.begin()
        with self.trace:
            yield
        found[what] = self.trace.end()

    def _microbatches(self) -> Iterator[MicroBatch]:
        layout, mesh = self.layout, self.mesh
        start, lengths, sources = 0, layout.local_lengths, len(self.config.data.mixture)
        held = None
        if layout.split.cp > 1:
            held = layout.split.local(layout.slice_lengths, mesh.cp.index)
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
                local_positions=held,
                positions=ids.t() if self.config.resets_positions else None,
                sequence_length=sum(lengths) if len(lengths) > 1 else None,
                sequence_scratch=Scratch() if len(lengths) > 1 else None,
            )
            start += length

    def _documents(self, length: int) -> Documents | None:
        """Return the documents of a sequence up to position `length`, on all cp ranks."""
        if not self.config.data.masks_documents:
            return None
        ids = torch.arange(length, device="cpu") // self.document
        return Documents(ids.expand(self.rows, length).contiguous(), _META)

    def _packed_best(self) -> int:
        """Return the shortest document length for which one packed kernel call takes all documents:
        such a call has the most padding."""
        positions = self.layout.local_length * self.layout.split.ulysses
        return max(1, positions * self.rows // most_together(positions, self.rows))

    def _before(self) -> StageSpec | None:
        """Return the layers before the part as a stage; None at the model's input."""
        spec, model = self.part.spec, self.layout.model
        if spec.embedding or not (spec.layers.start or model.has_embedding_and_head):
            return None
        return StageSpec(model.has_embedding_and_head, range(spec.layers.start), head=False)

    def _message(self, spec: StageSpec | None, length: int, *, gradient: bool = False) -> _Shapes:
        """Return shapes and types of the message after the layers `spec`, or of its gradient; () at
        the model's input and output."""
        model = self.layout.model
        if (
            spec is None
            or spec.head
            or (not model.has_embedding_and_head and spec.layers.stop == model.layers)
        ):
            return ()
        tensors = model.output_shape(spec, self.rows, length)
        sent = (each for each in tensors if each.has_grad or not gradient)
        return tuple((each.shape, getattr(torch, each.dtype)) for each in sent)

    def _received(self, shapes: _Shapes) -> Message:
        """Allocate a message, as a receive does."""
        tensors = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
        if not self.layout.sends_tuples:
            return tensors[0] if tensors else None
        return tensors or None

    def _transfer(self, seen: Collective) -> None:
        self.trace.note(
            Transfer(
                kind=seen.kind,
                axis=self._axis(seen),
                members=len(seen.ranks),
                span=seen.ranks[-1] - seen.ranks[0] + 1,
                bytes=seen.bytes,
                dtype=str(seen.dtype).removeprefix("torch."),
            )
        )

    def _axis(self, seen: Collective) -> str:
        mesh = self.mesh
        hops = zip(TWO_HOPS, mesh.ep_hops or (), strict=False)
        for name, axis in (("ep", mesh.ep), *hops):
            if seen.group is axis.group:
                return name
        if {*seen.ranks} <= {*mesh.tp.ranks}:
            return "tp"
        if {*seen.ranks} <= {*mesh.cp.ranks}:
            return "ulysses" if seen.kind == "all_to_all" else "cp"
        return "cp*tp"


def _grid(layout: Layout) -> Grid:
    """Return the grid of the ranks that share a pipeline index."""
    return Grid(
        pp=1,
        dp=layout.dp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        ranks_per_node=layout.ranks_per_node,
    )


def _built(module: StageModule) -> StageModule:
    """Allocate main gradients for the parameters of a stage, except frozen ones."""
    for parameter in module.parameters():
        parameter.requires_grad_(not spec_of(parameter).frozen)
        if parameter.requires_grad:
            high = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.empty_like(parameter, dtype=high, requires_grad=False)
    return module


class _WithoutValues:
    """A user-defined loss, or the sum of its inputs if it fails without values. In the second case
    only a real run shows what the loss saves."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, output: Any, labels: Tensor, mask: Tensor) -> Tensor:
        try:
            return self.loss(output, labels, mask)
        except FAILURES:
            tensors = (each for each in tree_leaves(output) if each.is_floating_point())
            return torch.stack([each.sum() for each in tensors]).sum()


def _fill_slots(config: Config, module: StageModule) -> None:
    """Attach expert slots to MoE layers, with a replica in each slot, if experts can move."""
    for replicas in attach_expert_replicas(config, {0: module}).get(0, ()):
        replicas.set_map(replicas.map.filled())


def _lasting(module: Any) -> Iterator[Tensor]:
    """Yield the tensors that exist between micro-batches."""
    for parameter in module.parameters():
        yield parameter.data
        if not spec_of(parameter).frozen:
            yield main_grad(parameter)
    yield from module.buffers()
    if hasattr(module, "constants"):
        yield from module.constants()
    for layer in expert_layers(module):
        if layer.replicas is not None:
            yield from layer.replicas.tensors()


def _most(one: _Walked, other: _Walked) -> _Walked:
    """Return the segments of `one`, with the higher peak of both walks in each."""
    return [
        {
            what: tuple(
                each.model_copy(update={"peak": max(each.peak, like.peak)})
                for each, like in zip(segments, others[what], strict=True)
            )
            for what, segments in found.items()
        }
        for found, others in zip(one, other, strict=True)
    ]


def _given(mb: MicroBatch) -> Iterator[Tensor]:
    for tensor in (mb.tokens, mb.labels, mb.mask, mb.positions, mb.by_source):
        if tensor is not None:
            yield tensor


class _EvenCounts:
    """Replacement of :func:`count_rows` for tokens that choose the experts of a layer in turn. This
    rank's experts get `imbalance` times the mean rows. If `imbalance` is None, they get as many
    rows as their capacity allows, or without a capacity the mean. The host knows the counts without
    waiting. All rows go to the owners, none to replicas."""

    def __init__(
        self, layer: RoutedExperts, rows: int, length: int, imbalance: Fraction | None
    ) -> None:
        self.layer, self.rows, self.length = layer, rows, length
        self.more = imbalance

    def __call__(self, choice: Tensor, slots: int, ep: Axis) -> ExpertCounts:
        counted = count_rows(choice, slots, ep)
        ranks = max(1, ep.size // self.layer.dispatcher.etp)
        experts, on_each = self.layer.routing.experts, slots // ranks
        owned = experts // ranks
        all_own = Fraction(choice.numel(), max(owned, choice.shape[-1]))  # a token's choices differ
        more = 1 if self.more is None or ranks == 1 else self.more
        of_own = min(Fraction(choice.numel()) * more / experts, all_own)
        if self.more is None and self.layer.routing.expert_capacity(self.length) is not None:
            of_own = all_own
        others = (choice.numel() - of_own * owned) / max(1, experts - owned)
        known, before = [], Fraction(0)
        for slot in range(slots):
            rank, number = divmod(slot, on_each)
            own = rank == ep.index // self.layer.dispatcher.etp
            after = before + (of_own if own else others) * (number < owned)
            known.append(self._bounded(ceil(after) - ceil(before)))  # whole rows with the right sum
            before = after
        return ExpertCounts([known] * ep.size, counted.on_device)

    def _bounded(self, rows: int) -> int:
        """Limit the rows of an expert to its capacity."""
        most = self.layer.routing.expert_capacity(self.length)
        if most is None:
            return rows
        return min(rows, -(-self.rows * most // self.layer.sharding.sequence.size))
