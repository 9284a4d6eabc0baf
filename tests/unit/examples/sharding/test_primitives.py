"""Plans of op-trans, op-assign and op-order, beside the generators of the package."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from examples.sharding.models import MLP
from examples.sharding.primitives import (
    Task,
    TaskGraph,
    as_schedule,
    co_shard,
    gpipe,
    interlaced,
    one_f_one_b,
    pipeline,
)
from megapipe.errors import ConfigError
from megapipe.ops.live_storages import LiveStorages
from megapipe.schedule.generators import build
from megapipe.schedule.proof.validate import validate

SIZES = [(1, 3), (2, 4), (3, 2), (4, 8)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize(("name", "make"), [("1f1b", one_f_one_b), ("gpipe", gpipe)])
def test_tables_are_those_of_the_generators(
    name: str, make: type[TaskGraph], stages: int, microbatches: int
) -> None:
    schedule = as_schedule(make(stages, microbatches), name)
    assert schedule.ops == build(name, ranks=stages, microbatches=microbatches).ops
    validate(schedule)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_an_interlaced_pipeline_is_1f1b_with_parts_of_the_embedding(
    stages: int, microbatches: int
) -> None:
    tables = interlaced(stages, microbatches).tables()
    stage_tasks = [
        [
            task._replace(layers=(task.layers[0] - 1, task.layers[0]))
            for task in table
            if task.part is None
        ]
        for table in tables
    ]
    assert stage_tasks == one_f_one_b(stages, microbatches).tables()
    parts = [[(t.kind, t.microbatch) for t in table if t.part is not None] for table in tables]
    assert all(own == parts[0] for own in parts), "their collectives would wait for each other"
    assert len(parts[0]) == 2 * microbatches


def test_a_large_embedding_costs_less_when_interlaced() -> None:
    """Stage 0 would take twice as long with it as the others."""
    stages, microbatches = 4, 8

    def makespan(graph: TaskGraph, embedding: float) -> float:
        def seconds(task: Task) -> float:
            if task.layers == (0, 1):
                return embedding
            return 1.0

        return max(start + seconds(task) for task, start in graph.starts(seconds).items())

    def alone(task: Task) -> float:
        return 2.0 if task.layers == (0, 1) else 1.0

    plain = one_f_one_b(stages, microbatches)
    whole = max(start + alone(task) for task, start in plain.starts(alone).items())
    assert makespan(interlaced(stages, microbatches), 1 / stages) < whole
    assert makespan(plain, 1.0) == 2 * (microbatches + stages - 1)


def test_co_shard_computes_the_same_with_less_memory() -> None:
    torch.manual_seed(0)
    mlp = MLP(8, 64).double()
    x = torch.randn(256, 8, dtype=torch.float64)
    outs, peaks = [], []
    for parts in (1, 2, 8):
        with LiveStorages() as live:
            y = co_shard(mlp, parts)(x)
            grads = torch.autograd.grad(y.square().sum(), list(mlp.parameters()))
            outs.append([y.detach(), *grads])
        peaks.append(live.peak)
    y = mlp(x)
    outs.append([y.detach(), *torch.autograd.grad(y.square().sum(), list(mlp.parameters()))])
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 3


def test_plans_that_cannot_be() -> None:
    graph = pipeline(2, 2)
    with pytest.raises(ConfigError, match=r"device . has . of layers .* in no order"):
        graph.tables()
    forward, backward = (Task(kind, (0, 1), 0) for kind in "FB")
    with pytest.raises(ConfigError, match="is no task of the graph"):
        graph.op_order([forward._replace(microbatch=7), backward])
    graph = gpipe(2, 2)
    graph.op_order([backward, forward])
    with pytest.raises(ConfigError, match="tasks wait for each other: "):
        graph.tables()
    with pytest.raises(ConfigError, match="3 parts do not divide a width of 64"):
        co_shard(MLP(8, 64), 3)


def test_each_device_runs_its_table_one_by_one() -> None:
    graph = one_f_one_b(3, 4)
    starts = graph.starts(lambda task: 2.0 if task.kind == "B" else 1.0)
    for table in graph.tables():
        for first, then in pairwise(table):
            assert starts[then] >= starts[first] + (2.0 if first.kind == "B" else 1.0)
