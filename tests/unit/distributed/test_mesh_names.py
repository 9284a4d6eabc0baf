"""Members of a group find each other, by its name and in the order in which they make theirs.

A process blocks in the making of a group until all members are there. Here each rank of a world
makes its groups alone, on torch's fake process group, and the rest is a game on the lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megapipe.assembly.context import make_context
from megapipe.assembly.sharding import make_sharding
from megapipe.config.config import Config
from megapipe.context.plans import ring
from megapipe.context.split import PositionSplit
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.engine.channels import ProcessGroupChannels
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.moe.sharding import MoESharding, expert_parameter
from megapipe.layers.parameter import new_parameter
from megapipe.layers.specs import ParameterSpec
from megapipe.layout.buckets import process_buckets
from megapipe.layout.context_plan import ContextPlans
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import make_buckets
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.lower import pairs
from megapipe.schedule.placement import Placement, loop
from megapipe.watch.journal import LINE
from tests.parity.group_order import Made, check_all_are_made, groups_made


class Job(NamedTuple):
    """What decides which groups the processes of a job make."""

    grid: Grid
    placement: Placement
    zero: int = 1
    shard_size: int | None = None
    tied: bool = False
    empty: frozenset[int] = frozenset()
    """Stages without parameters of their own."""
    experts: frozenset[int] | None = None
    """Stages with experts; None: the model has none."""
    split: PositionSplit = PositionSplit()


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    pp, dp, tp = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    in_ring, ulysses = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]))
    grid = Grid(pp=pp, dp=dp, cp=in_ring * ulysses, tp=tp)
    rest = draw(st.lists(st.integers(0, pp - 1), max_size=3))
    rows = draw(st.lists(st.permutations([*range(pp), *rest]), min_size=1, max_size=3))
    others = draw(st.lists(st.integers(0, pp - 1), min_size=len(rows[0]), max_size=len(rows[0])))
    placement = Placement(pp, tuple(map(tuple, [*rows, others])))
    stages = st.integers(0, placement.stages - 1)
    experts = draw(st.none() | st.frozensets(stages, min_size=1, max_size=4))
    if experts is not None:
        inner, outer = (draw(st.sampled_from([1, 2, 2, 3])) for _ in range(2))
        block = grid.num_replicas() * tp
        ep = max(n for n in (inner * outer, outer, inner, 1) if block % n == 0)
        etp = draw(st.sampled_from([n for n in (1, 2) if block % (ep * n) == 0]))
        node = inner if etp == 1 and inner > 1 < outer and ep == inner * outer else None
        grid = replace(grid, ep=ep, etp=etp, ranks_per_node=node)
    copies = (
        {grid.num_replicas(), grid.num_replicas(over_ep=True)}
        if experts is not None
        else {grid.num_replicas()}
    )
    sizes = [
        n for n in divisors(grid.num_replicas()) if all(each % min(n, each) == 0 for each in copies)
    ]
    stage = draw(st.integers(0, 3))
    size = draw(st.sampled_from([None, *sizes])) if stage else None
    return Job(
        grid,
        placement,
        stage if (size or max(copies)) > 1 else min(stage, 1),
        size,
        draw(st.booleans()),
        draw(st.frozensets(stages, max_size=2)),
        experts,
        PositionSplit(in_ring, ulysses, heads_first=draw(st.booleans())),
    )


@contextmanager
def alone(grid: Grid, rank: int) -> Iterator[ParallelMesh]:
    """Yield the mesh of a process whose groups connect nothing."""
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    try:
        yield ParallelMesh(grid, device=torch.device("cpu"), timeout_s=60.0)
    finally:
        dist.destroy_process_group()


class Family(NamedTuple):
    """Parameters of a job's model."""

    job: Job
    dtype: str = "fp32"

    def parameters(self, stage: int) -> Iterator[ParameterSpec]:
        """Yield one parameter, one of experts, and the word embedding at both ends."""
        job = self.job
        last = job.placement.stages - 1
        word = ParameterSpec(name="word", shape=(2, 2), tied=job.tied)
        if stage not in job.empty:
            yield ParameterSpec(name=f"layers.{stage}.weight", shape=(2, 2))
        if job.experts is not None and stage in job.experts:
            shape = (2 * job.grid.ep, 2, 2)
            yield ParameterSpec(name=f"layers.{stage}.experts", shape=shape, over_ep=True)
        if stage == 0:
            yield word
        if stage == last:
            yield replace(word, name="word" if job.tied else "head", use=int(job.tied))


SIZES = ("pp", "dp", "cp", "tp", "ep", "etp", "ranks_per_node")


def settled(job: Job) -> tuple[Config, Layout]:
    """Return the configuration and the layout of a job whose stages are numbers."""
    moe: dict[str, Any] = {} if job.experts is None else {"num_experts": 2 * job.grid.ep}
    model = {"moe": moe, "dtype": "fp32"}
    optimizer = {"shard_group_size": job.shard_size}
    config = Config.model_validate({"model": model, "optimizer": optimizer})
    grid, plan = job.grid, ring(job.split.ring)
    stages: Any = tuple(range(job.placement.stages))
    family: Any = Family(job)
    return config, replace(
        resolve(Config(), None, 256)[1],
        **{name: getattr(grid, name) for name in SIZES},
        model=family,
        stage_layers=stages,
        split=job.split,
        context=ContextPlans(plan, plan),
        replicas=ReplicaPolicy(job.zero),
        schedule=gpipe_on(job.placement, 1),
    )


def module_of(
    specs: Iterable[ParameterSpec], grid: Grid, config: Config, mesh: ParallelMesh
) -> nn.Module:
    """Build a module of these parameters; the groups of experts are made for it."""
    sharding = make_sharding(config, mesh, Kernels())
    module = nn.Module()
    for number, spec in enumerate(specs):
        if spec.over_ep:
            split = MoESharding.of(sharding)
            owners = ExpertOwners(ExpertMap.even(2 * grid.ep, grid.ep), split.rank)
            made = expert_parameter(split, spec, owners)
        else:
            made = new_parameter(sharding, spec)
        module.register_parameter(str(number), made)
    return module


def made_by(job: Job, rank: int) -> list[Made]:
    """Return the groups of a process, in order: axes, those for attention, channels, those of
    experts and of buckets."""
    placement = job.placement
    with alone(job.grid, rank) as mesh:
        config, layout = settled(job)
        make_context(layout, mesh, cast(Any, None))
        ProcessGroupChannels(mesh, pairs(placement), dtype=torch.float32)
        modules = {
            s: module_of(layout.model.parameters(cast(Any, s)), job.grid, config, mesh)
            for s in layout.process_stages(mesh.at.pp)
        }
        make_buckets(process_buckets(config, layout, mesh.at.pp), modules, mesh)
        return groups_made(job.grid.world)


HOPS = Job(
    Grid(pp=2, dp=4, cp=2, ep=4, ranks_per_node=2),
    loop(2),
    tied=True,
    experts=frozenset({0, 1}),
    split=PositionSplit(2, 1),
)
"""A job with tokens over two nodes, and a group of experts that is no axis: rarely drawn."""


@settings(max_examples=15)
@example(HOPS)
@given(jobs())
def test_every_group_is_made(job: Job) -> None:
    check_all_are_made([made_by(job, rank) for rank in range(job.grid.world)])


def test_who_waits_for_the_members_of_a_group_says_so() -> None:
    """The journal has each member by itself: one may be gone."""
    waits: list[tuple[int, ...]] = []
    helper = dist.distributed_c10d._new_process_group_helper

    with alone(Grid(pp=2, tp=2), 1) as mesh:
        heeds = [ranks for _, ranks in mesh.journal._lines]

        def note(*given: Any, **options: Any) -> Any:
            waits.append(tuple(mesh.journal._lines[mesh.journal.words[LINE] - 1][1]))
            assert mesh.journal.words[LINE] > 0
            return helper(*given, **options)

        with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", note):
            mesh.group_of((1, 3))
        assert mesh.journal.words[LINE] == 0
    assert waits == [(1, 3)]
    assert (0, 1) in map(tuple, heeds), "and for those of an axis"


CHAIN = Job(Grid(pp=3), loop(3))


def test_names_that_count_all_groups_are_noticed() -> None:
    """The middle one of three ranks in a chain makes more groups: torch's own names then differ."""

    def as_torch(ranks: Sequence[int], twins: int) -> str:
        return f"{ranks} {len(dist.distributed_c10d._world.pg_names)}"

    check_all_are_made([made_by(CHAIN, rank) for rank in range(3)])
    with mock.patch("megapipe.distributed.mesh.group_name", as_torch):
        made = [made_by(CHAIN, rank) for rank in range(3)]
    with pytest.raises(AssertionError, match="these wait for ever"):
        check_all_are_made(made)


def test_an_order_that_goes_in_circles_is_noticed() -> None:
    first, second, third = Made("a", (0, 1)), Made("b", (1, 2)), Made("c", (0, 2))
    check_all_are_made([[first, third], [first, second], [second, third]])
    with pytest.raises(AssertionError, match="these wait for ever"):
        check_all_are_made([[third, first], [first, second], [second, third]])
