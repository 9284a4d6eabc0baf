"""Tensor-parallel collectives beside weight gradients: which are exposed, and that hiding them
changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.layers.microbatch import MicroBatch
from megapipe.testing import World, run_world
from tests.parity.checking import assert_same_bits
from tests.parity.collective_recorder import recording
from tests.parity.ranks import OF_ALL_MODELS, Case, configure, run_cases

LAYERS = 3
Counts = dict[str, tuple[int, int]]
"""Numbers of collectives and of exposed ones, by operation."""


def count(world: World, cases: list[Case]) -> list[Counts]:
    """Count the operations of the second of four stages, which is blocks alone."""
    return [count_one(world, case) for case in cases]


def count_one(world: World, case: Case) -> Counts:
    config, layout = configure(case)
    stage = TrainStep(config, layout, world.mesh(Grid(tp=case.tp))).stages[1]
    local = case.sequence // (case.tp if case.sequence_parallel else 1)
    x = torch.ones(local, case.batch, config.model.hidden, dtype=torch.float64)
    mb = MicroBatch(index=0, step=0, seed=1)
    stage.begin(train=True)
    stage.forward((1, 0), x, mb)
    counts = {}
    for name, operation in (
        ("F", lambda: stage.forward((0, 0), x, mb)),
        ("I", lambda: stage.input_grad((0, 0), x)),
        ("W", lambda: stage.weight_grad((0, 0))),
        ("B", lambda: stage.backward((1, 0), x)),
    ):
        with recording() as recorder:
            operation()
        counts[name] = len(recorder.calls), len(recorder.exposed())
    return counts


MIDDLE = Case(tp=2, pp=4, in_process=True, layers=3 + LAYERS, uneven=True)
SPLIT = replace(MIDDLE, sequence_parallel=True)
FORWARD = (4 * LAYERS, 4 * LAYERS)
HIDDEN = {"F": FORWARD, "I": FORWARD, "W": (4 * LAYERS, 1), "B": (6 * LAYERS, 1)}
"""Counts with sequence parallelism."""
EXPECTED = {
    MIDDLE: {
        "F": (2 * LAYERS, 2 * LAYERS),
        "I": (2 * LAYERS, 2 * LAYERS),
        "W": (0, 0),
        "B": (2 * LAYERS, 0),
    },
    SPLIT: HIDDEN,
    replace(SPLIT, activations="selective"): HIDDEN,  # recomputed modules gather nothing
    replace(MIDDLE, overlap=False): {
        "F": (2 * LAYERS, 2 * LAYERS),
        "I": (2 * LAYERS, 2 * LAYERS),
        "W": (0, 0),
        "B": (2 * LAYERS, 2 * LAYERS),
    },
    replace(SPLIT, overlap=False): {
        "F": FORWARD,
        "I": FORWARD,
        "W": (4 * LAYERS, 4 * LAYERS),
        "B": (6 * LAYERS, 6 * LAYERS),
    },
}


def test_exposed_collectives_per_operation() -> None:
    """Per layer 2 in F and I without sequence parallelism, 4 with; in B and W the first gather."""
    for found in run_world(2, count, list(EXPECTED)):
        assert dict(zip(EXPECTED, found, strict=True)) == EXPECTED


def gathers_of_the_first_stage(world: World, case: Case) -> tuple[int, int]:
    """Count collectives of the first stage's W, the last of which is for the embedding, and exposed
    ones."""
    config, layout = configure(case)
    stage = TrainStep(config, layout, world.mesh(Grid(tp=case.tp))).stages[0]
    tokens = torch.zeros(case.batch, case.sequence, dtype=torch.int64)
    stage.begin(train=True)
    y = stage.forward((0, 0), None, MicroBatch(index=0, step=0, seed=1, tokens=tokens))
    stage.input_grad((0, 0), torch.ones_like(y))
    with recording() as recorder:
        stage.weight_grad((0, 0))
    return len(recorder.calls), len(recorder.exposed())


@pytest.mark.full
def test_the_embedding_gathers_beside_the_gradient_before_its_own() -> None:
    layers = SPLIT.layers - LAYERS - 2  # of the first of four stages
    for counts in run_world(2, gathers_of_the_first_stage, replace(SPLIT, model="llama")):
        assert counts == (4 * layers + 1, 1)


POLICIES = len(OF_ALL_MODELS)


def cases(tp: int) -> list[Case]:
    """Return every policy, with and without sequence parallelism, in either type: first each in one
    type by turns, then in the other one. Schedules and models take turns."""
    return [
        Case(
            tp=tp,
            pp=2,
            in_process=True,
            sequence_parallel=sequence_parallel,
            activations=policy,
            dtype="fp32" if (i + sequence_parallel + other) % 2 else "fp64",
            schedule=("1f1b", "zb_h1", "zb_v")[i % 3],
            chunks=2 if i % 3 == 2 else None,
            model=("gpt2", "llama", "mixed", "gelu")[i // 2 % 4],
            loss_chunk=0 if i % 4 < 2 else None,
        )
        for other in (False, True)
        for sequence_parallel in (True, False)
        for i, policy in enumerate(OF_ALL_MODELS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("quarter", range(4))
def test_hiding_collectives_changes_no_bit(tp: int, quarter: int) -> None:
    """In worlds of a quarter each: all cases take minutes on four processes."""
    check_bits(cases(tp)[quarter * POLICIES : (quarter + 1) * POLICIES])


@pytest.mark.slow
def test_hiding_some_collectives_changes_no_bit() -> None:
    """Cases are of two ranks, in one type each."""
    check_bits(cases(2)[: 2 * POLICIES : 5])


@pytest.mark.full
def test_hiding_collectives_of_four_ranks_changes_no_bit() -> None:
    """I and W with sequence parallelism, in fp64; B without it, in fp32."""
    split, whole = cases(4)[1], cases(4)[POLICIES + 3]
    assert (split.schedule, split.dtype, split.sequence_parallel) == ("zb_h1", "fp64", True)
    assert (whole.schedule, whole.dtype, whole.sequence_parallel) == ("1f1b", "fp32", False)
    check_bits([split, whole])


def check_bits(hidden: list[Case]) -> None:
    plain = [replace(case, overlap=False) for case in hidden]
    for outcomes in run_world(hidden[0].world, run_cases, [*hidden, *plain]):
        halves = outcomes[: len(hidden)], outcomes[len(hidden) :]
        for case, one, other in zip(hidden, *halves, strict=True):
            assert_same_bits(one, other, case.name)
