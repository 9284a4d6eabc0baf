"""Planned activation memory against what is held: ``python benchmarks/memory.py``.

Every registered schedule runs one step in one process, with every kind of activation policy that a
layout accepts for it. Each storage that a stage's operation makes has a finaliser, and live
storages are added up per rank: after each operation, and within it at each allocation. The plan,
that of ``--dry-run`` (:mod:`megapipe.plan.activation_memory`), runs each stage once without values
and adds up what the operations of the same schedule should hold. Messages in flight are in neither.

Then the same is measured with positions split over two processes on gloo, for the one that holds
most. Finally :mod:`model_memory` does it for what a process holds of the model.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import model_memory
import torch
from common import Result, parser, report
from torch import Tensor

from megapipe.assembly.context import make_context
from megapipe.config.config import Config, KernelsConfig
from megapipe.distributed.mesh import Axis, Grid, ParallelMesh
from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor, run_together
from megapipe.engine.stage import Key, Stage
from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, Sharding, spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.stage import GPTStage
from megapipe.ops.kernels import Kernels
from megapipe.ops.live_storages import LiveStorages
from megapipe.ops.tile_attention import CpuFlash
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.units import Units
from megapipe.schedule.generators import names
from megapipe.schedule.ir import Op
from megapipe.schedule.lower import lower
from megapipe.schedule.proof.validate import validate
from megapipe.testing import World, run_world
from megapipe.train.feed import work_items

RANKS, ROWS, VOCABULARY = 4, 4, 257
KERNELS = Kernels(loss_chunk=KernelsConfig().loss_tokens(cuda=False))
LEAST_MICROBATCHES = 5
TOLERANCE = 0.01
SCALAR = 8
"""Bytes of the loss of a micro-batch, which is kept to the end of the step and not counted."""
SLACK = 512
"""Bytes, less than a message has, by which more may be held than planned."""
ALL = ["norm", "attention", "mlp_activation"]
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
    "stage": {"policy": "stage"},
    "offload": {"offload": ALL},
    "norms again, offload": {"policy": "selective", "modules": ["norm"], "offload": ALL},
}
CP, TIMES = 2, 10
"""Ranks over which positions are split; and how often each is measured there at most: gloo's
threads may free what they have sent a moment late."""
LET_GO_S = 10.0
"""Seconds by which that may be late at the end."""
CONTEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({}, {}),
    "Ulysses": ({"ulysses": CP}, {}),
    "all_gather": ({"algorithm": "all_gather"}, {}),
    "ring, attention kept": ({}, {"policy": "full", "keep_attention": True}),
    "Ulysses, selective, attention kept": (
        {"ulysses": CP},
        {"policy": "selective", "keep_attention": True},
    ),
}
"""Values of the sections context and activations."""


class Alive(NamedTuple):
    """Memory that is held at one time, or at most."""

    device: int = 0
    """Bytes on the device."""
    host: int = 0
    """Bytes on the host."""
    within: int = 0
    """Bytes on the device within operations."""
    activations: int = 0
    """Work items, each counted at each stage that has a graph or weight gradients of it."""

    def most(self, other: Alive) -> Alive:
        return Alive(*map(max, zip(self, other, strict=True)))

    @staticmethod
    def total(parts: Iterable[Alive]) -> Alive:
        return Alive(*map(sum, zip(*parts, strict=True)))


class Rank:
    """The stages of one pipeline rank, and the most that they held after an operation."""

    def __init__(self) -> None:
        self.stages: dict[int, Measured] = {}
        self.peak = Alive()
        self.live = LiveStorages()
        """Storages of all operations of the rank."""

    def note(self) -> None:
        self.peak = self.peak.most(Alive.total(stage.alive() for stage in self.stages.values()))


class Measured(Stage):
    """A stage that notes what its operations leave alive.

    Inputs are copied, so that they belong to the operation, and so are outputs, so that they do
    not.
    """

    def __init__(
        self, rank: Rank, module: GPTStage, spans: Sequence[BlockSpan], *, again: bool
    ) -> None:
        super().__init__(module, spans, recompute=again)
        self.rank = rank
        self.live: dict[Key, LiveStorages] = {}
        self.graphs: set[Key] = set()
        """Work items that have had a graph: more than their input is held."""

    def forward(self, key: Key, x: Tensor | None, mb: MicroBatch) -> Tensor | None:
        given = [t for t in (mb.tokens, mb.labels, mb.mask) if t is not None]
        weights = [t for p in self.module.parameters() for t in (p.data, main_grad(p))]
        self.live[key] = LiveStorages([*given, *weights])
        self.rank.live.know([*given, *weights])
        with self.rank.live, self.live[key]:
            y = super().forward(key, None if x is None else x.clone(), mb)
        y = None if y is None else y.clone()
        if not self.recomputes:
            self.graphs.add(key)
        self.rank.note()
        return y

    def recompute(self, key: Key) -> None:
        with self.rank.live, self.live[key]:
            super().recompute(key)
        self.graphs.add(key)
        self.rank.note()

    def input_grad(self, key: Key, grad: Tensor | None) -> Tensor | None:
        with self.rank.live, self.live[key]:
            out = super().input_grad(key, None if grad is None else grad.clone())
        out = None if out is None else out.clone()
        self.rank.note()
        return out

    def weight_grad(self, key: Key) -> None:
        with self.rank.live, self.live[key]:
            super().weight_grad(key)

    def alive(self) -> Alive:
        """Return what is held now for all work items. A cache that slices share belongs to none."""
        cached = {
            id(tensor.untyped_storage())
            for cache in self._caches.values()
            for of_layer in cache._rows.values()
            for rows in of_layer
            for tensor in (rows.values, rows.grad)
            if tensor is not None
        }
        device: dict[int, int] = {}
        host: dict[int, int] = {}
        counted = 0
        for key, storages in self.live.items():
            own = {name: live for name, live in storages.alive.items() if live.bytes > SCALAR}
            for name, live in own.items():
                (host if live.in_host else device)[name] = live.bytes
            counted += key in self.graphs and not own.keys() <= cached
        return Alive(sum(device.values()), sum(host.values()), activations=counted)


def configure(
    schedule: str, activations: dict[str, Any], sequence: int, context: dict[str, Any] | None = None
) -> tuple[Config, Layout]:
    """Return a configuration with the fewest micro-batches, from LEAST_MICROBATCHES on, that the
    schedule takes; with a section `context` positions are split."""
    cp = 1 if context is None else CP
    refusal: ConfigError | None = None
    for microbatches in range(LEAST_MICROBATCHES, LEAST_MICROBATCHES + 2 * RANKS):
        config = Config.model_validate(
            {
                "model": {
                    "layers": 4 * RANKS,
                    "hidden": 64,
                    "heads": 4,
                    "vocab_size": VOCABULARY,
                    "tied_embeddings": False,
                },
                "parallel": {"pp": RANKS, "cp": cp, "device": "cpu"},
                "context": context or {},
                "pipeline": {"schedule": schedule, "transport": "in_process"},
                "activations": activations,
                "train": {
                    "sequence_length": sequence,
                    "microbatch": ROWS,
                    "global_batch": ROWS * microbatches,
                },
            }
        )
        try:
            return resolve(config, cp, VOCABULARY, measure=BY_UNITS)
        except ConfigError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def measure(config: Config, layout: Layout, mesh: ParallelMesh | None = None) -> list[Alive]:
    """Return per rank the most that was alive after any of its operations; with a `mesh` over which
    positions are split, for one of its processes."""
    schedule, model = layout.schedule, config.model
    kernels, place = KERNELS, 0
    if mesh is not None:
        kernels = replace(KERNELS, context=make_context(layout, mesh, CpuFlash()))
        place = mesh.cp.index
    modules = []
    for index, spec in enumerate(layout.stage_layers):
        sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[model.dtype], kernels=kernels)
        modules.append(GPTStage(model, spec, sharding))
        Bucket(index, list(owned_parameters(modules[-1])), Axis.alone(), torch.device("cpu"))
        for parameter in modules[-1].parameters():
            spec_of(parameter).initialise(parameter.data, seed=1)
    ranks = [Rank() for _ in range(RANKS)]
    owned: set[int] = set()
    executors = []
    for program, channels in zip(lower(schedule), InProcessChannels.connect(RANKS), strict=True):
        rank = ranks[program.rank]
        for s in schedule.placement.stages_of(program.rank):
            again = s in schedule.recompute
            rank.stages[s] = Measured(rank, modules[s], layout.block_policies[s], again=again)
            if s not in owned:
                rank.stages[s].route_autograd_grads()
                owned.add(s)

        def shape(message: Op) -> tuple[int, int, int]:
            rows = int(schedule.size_of(message.microbatch) * ROWS)
            return layout.local_lengths[message.slice], rows, model.hidden

        executors.append(Executor(program, rank.stages, channels, shape=shape, train=True))
    run_together(executors, microbatches(layout, place))
    stages = [stage for rank in ranks for stage in rank.stages.values()]
    until = time.monotonic() + LET_GO_S
    while any(any(stage.alive()) for stage in stages):
        assert mesh is not None, "something outlived its W"
        assert time.monotonic() < until, "something outlived its W"
        time.sleep(0.001)
    return [rank.peak._replace(within=rank.live.peak) for rank in ranks]


def microbatches(layout: Layout, place: int) -> dict[Key, MicroBatch]:
    """Return random tokens for each work item of the schedule, at the positions of a
    context-parallel index."""
    result = {}
    generator = torch.Generator().manual_seed(0)
    length, cp = layout.local_length, layout.cp
    held = layout.split.local(layout.slice_lengths, place) if cp > 1 else None
    for piece in work_items(layout.schedule, ROWS, layout.slice_lengths):
        positions = piece.positions.stop - piece.positions.start
        shape = piece.rows.stop - piece.rows.start, positions // cp
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        result[piece.key] = MicroBatch(
            index=piece.whole,
            step=0,
            seed=0,
            tokens=tokens,
            labels=tokens.roll(-1, 1),
            mask=torch.ones(shape, dtype=torch.bool),
            scale=1.0 / length,
            first_row=piece.rows.start,
            start=piece.positions.start // cp,
            local_positions=held,
            sequence_length=length if layout.schedule.slices > 1 else None,
        )
    return result


def predict(config: Config, layout: Layout) -> list[Alive]:
    """Return per rank the most that its operations should hold: bytes by plan, activations as the
    validator counts them."""
    units = Units(config, layout)
    return [
        Alive(
            *peak_activations(units, rank, inside=False),
            peak_activations(units, rank).device,
            activations,
        )
        for rank, activations in enumerate(validate(layout.schedule).peak_held)
    ]


def compare(
    schedules: Collection[str], policy: str, sequence: int, refused: list[str]
) -> Iterator[Result]:
    """Yield the largest relative differences of any rank of any of the schedules.

    Adds to `refused` the layout's messages about schedules that do not go with the policy.
    """
    cases: dict[str, tuple[Config, Layout]] = {}
    for name in schedules:
        try:
            cases[name] = configure(name, POLICIES[policy], sequence)
        except ConfigError as error:
            refused.append(f"policy {policy}: {error}")
    assert cases, f"policy {policy}: every schedule is refused"
    measured = {name: measure(*case) for name, case in cases.items()}
    yield from claims(f"policy {policy}", cases, measured)


def compare_split(
    schedules: Collection[str], name: str, sequence: int, refused: list[str]
) -> Iterator[Result]:
    """Yield :func:`compare` with positions split over CP processes as CONTEXTS[name] says."""
    cases: dict[str, tuple[Config, Layout]] = {}
    context, activations = CONTEXTS[name]
    for schedule in schedules:
        try:
            cases[schedule] = configure(schedule, activations, sequence, context)
        except ConfigError as error:
            refused.append(f"cp {CP}, {name}: {error}")
    assert cases, f"{name}: every schedule is refused"
    members = run_world(CP, measure_split, list(cases.values()), timeout_s=3600)
    measured = {
        schedule: [Alive(*map(max, zip(*ranks, strict=True))) for ranks in zip(*found, strict=True)]
        for schedule, found in zip(cases, zip(*members, strict=True), strict=True)
    }
    yield from claims(f"cp {CP}, {name}", cases, measured)


def measure_split(world: World, cases: Sequence[tuple[Config, Layout]]) -> list[list[Alive]]:
    """Measure one rank by case and pipeline rank: the least of some times, until no rank holds more
    than is planned."""
    mesh = world.mesh(Grid(cp=CP))
    found = []
    for config, layout in cases:
        planned = predict(config, layout)
        least = measure(config, layout, mesh)
        for _ in range(TIMES - 1):
            over = any(
                own > most + SLACK
                for rank, wanted in zip(least, planned, strict=True)
                for own, most in zip(rank, wanted, strict=True)
            )
            if not mesh.any(over):
                break
            pairs = zip(least, measure(config, layout, mesh), strict=True)
            least = [Alive(*map(min, zip(*pair, strict=True))) for pair in pairs]
        found.append(least)
    return found


def claims(
    what: str,
    cases: Mapping[str, tuple[Config, Layout]],
    found: Mapping[str, Sequence[Alive]],
) -> Iterator[Result]:
    """Yield the largest relative differences of any rank of any of the schedules."""
    worst: dict[str, tuple[float, str]] = dict.fromkeys(Alive._fields, (0.0, ""))
    for name, case in cases.items():
        ranks = zip(found[name], predict(*case), strict=True)
        for rank, (measured, predicted) in enumerate(ranks):
            for field, ours, planned in zip(Alive._fields, measured, predicted, strict=True):
                difference = abs(ours - planned) / max(planned, 1)
                worst[field] = max(worst[field], (difference, f": {name}, rank {rank}"))
    of_bytes = max(worst["device"], worst["host"])
    for claim, (difference, where), tolerance in (
        ("bytes", of_bytes, TOLERANCE),
        ("bytes within operations", worst["within"], TOLERANCE),
        ("pieces", worst["activations"], 0.0),
    ):
        yield Result(
            claim=f"{what}: {claim} held at the peak",
            value=100 * difference,
            target=100 * tolerance,
            unit="% off",
            peer=f"plan, {len(cases)} schedules{where if difference else ''}",
        )


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    sequence = 16 if given.quick else 64
    schedules = ["merak", "zb_v", "seq1f1b"] if given.quick else names()
    refused: list[str] = []
    split, of_split = (["ring"], ["merak"]) if given.quick else ([*CONTEXTS], schedules)
    held = ["interleaved_1f1b"] if given.quick else names()
    results: list[Result] = []
    for result in itertools.chain(
        *(compare(schedules, policy, sequence, refused) for policy in POLICIES),
        *(compare_split(of_split, name, sequence, refused) for name in split),
        model_memory.compare(held, refused),
    ):
        print(f"{result.claim}: {result.value:.4g}{result.unit}", file=sys.stderr, flush=True)
        results.append(result)
    print(*(f"refused: {line}" for line in refused), sep="\n")
    report("Memory", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
