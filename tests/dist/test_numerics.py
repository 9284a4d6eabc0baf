"""Bitwise promises, tied copies, dropout, bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megapipe import TrainStep
from megapipe.checkpoint.regions import whole
from megapipe.distributed.mesh import Grid
from megapipe.optim.lr import learning_rate
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.bitwise import assert_bitwise, outcomes_of
from tests.parity.ranks import (
    STEPS,
    Case,
    assemble,
    batch_of,
    configure,
    expected,
    local_copies,
    plain,
)
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_schedules_swap_bitwise(dp: int) -> None:
    """Same dp, tp, stages and micro-batches: the schedule does not change a bit (fp32)."""
    base = Case(dp=dp, pp=2, m=5, dtype="fp32", masked=0.3, layers=4, schedule="gpipe")
    looped = replace(base, chunks=2)
    interleaved = replace(looped, schedule="interleaved_1f1b")
    swaps = [
        [base, replace(base, schedule="1f1b"), replace(base, schedule="zb_h1")],
        [looped, *(replace(interleaved, group=g) for g in (1, 2, 3, 5))],
    ]
    if dp == 2:
        deep = replace(base, pp=4)
        swaps.append([deep, replace(deep, schedule="1f1b"), replace(deep, schedule="zb_h1")])
    for cases in swaps:
        first, *others = outcomes_of(cases)
        assert base.clip is not None
        assert min(first[0].norms) > base.clip, "the clip is not active"
        for other in others:
            assert_bitwise(other, first)


def test_in_process_channels_are_bitwise_those_of_process_groups() -> None:
    """The channel kind changes nothing where the reductions are the same (untied)."""
    case = Case(dp=2, tp=2, pp=2, m=4, dtype="fp32", schedule="zb_h1", tied=False)
    (groups,) = outcomes_of([case])
    (local,) = outcomes_of([replace(case, in_process=True)])
    assert groups[0].losses == local[0].losses
    assert groups[0].norms == local[0].norms
    shapes = reference.init_random(configure(case)[0].model, seed=3)
    for i in range(STEPS):
        a = assemble([o.grads[i] for o in groups], shapes)
        b = assemble([o.grads[i] for o in local], shapes)
        assert all(a[name].equal(b[name]) for name in shapes)


def long_run(world: World, case: Case, steps: int) -> list[tuple[str, Any]]:
    """Return this rank's weights after some steps, the two uses of a tied one apart."""
    config, layout = configure(case)
    mesh = world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp))
    step = TrainStep(config, layout, mesh)
    tokens, labels, mask = batch_of(case, 0)

    def rows(indices: Any) -> Any:
        index = [i % len(tokens) for i in indices]
        return tokens[index], labels[index], mask[index].bool()

    start = [values for _, _, values in local_copies(step)]
    for i in range(steps):
        step.train(i, rows)
    copies = [(name, values) for name, _, values in local_copies(step)]
    assert not any(np.allclose(a, b) for a, (_, b) in zip(start, copies, strict=True)), (
        "not trained"
    )
    return copies


@pytest.mark.parametrize(
    ("pp", "zero"),
    [(2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (1, 1)))],
)
def test_tied_copies_stay_bitwise_equal(pp: int, zero: int) -> None:
    """50 steps at dp4 in fp32: every copy of the shared embedding is the same."""
    case = Case(dp=4, pp=pp, m=2, dtype="fp32", zero=zero, schedule="1f1b", layers=2)
    ranks = run_world(case.world, long_run, case, 50)
    copies = [c for rank in ranks for name, c in rank if name == "embedding.word.weight"]
    assert len(copies) == 8, "two holders of four replicas, or two uses on one"
    assert all(np.array_equal(copy, copies[0]) for copy in copies)


@in_parts("zero", [0, 1], full=[1])
def test_the_copies_of_replicated_stages_stay_bitwise_equal(zero: int) -> None:
    """50 steps in fp32: each of two pipelines in opposite directions, twice for dp, has a copy."""
    case = Case(dp=2, pp=2, m=3, dtype="fp32", zero=zero, schedule="chimera", masked=0.3)
    copies: dict[str, list[Any]] = {}
    for rank in run_world(case.world, long_run, case, 50):
        for name, values in rank:
            copies.setdefault(name, []).append(values)
    assert len(copies) == len(reference.shapes(configure(case)[0].model))
    for name, values in copies.items():
        assert len(values) == (8 if name == "embedding.word.weight" else 4)
        assert all(np.array_equal(copy, values[0]) for copy in values), name


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_dropout_is_the_same_for_replicas_and_parts(tp: int, sp: bool) -> None:
    """At fixed tp and micro-batch size no schedule changes the masks; of plain ones the parity
    matrix sees to it."""
    base = Case(m=8, dropout=0.2, masked=0.2)
    layouts = [
        replace(base, pp=2, schedule="chimera"),
        replace(base, pp=4, in_process=True, schedule="varuna"),
    ]
    shapes = reference.init_random(configure(base)[0].model, seed=3)
    one = replace(base, tp=tp, sequence_parallel=sp)
    alone, without = outcomes_of([one, replace(one, dropout=0.0)])
    assert abs(alone[0].losses[0] - without[0].losses[0]) > 1e-4, "dropout does something"
    assert alone[0].validation == without[0].validation, "but not in validation"
    for layout in layouts:
        (here,) = outcomes_of([replace(layout, tp=tp, sequence_parallel=sp)])
        for i in range(STEPS):
            assert abs(here[0].losses[i] - alone[0].losses[i]) < 1e-12
            expected = assemble([o.grads[i] for o in alone], shapes)
            actual = assemble([o.grads[i] for o in here], shapes)
            reference.assert_grads_close(actual, expected)


BF16 = [
    Case(dtype="bf16"),
    Case(dtype="bf16", tp=2, pp=2, dp=2, sequence_parallel=True, m=4, schedule="zb_h1"),
    Case(dtype="bf16", tp=4, model="llama", tied=False, m=4, dp=2, zero=0),
    Case(dtype="bf16", pp=2, chunks=2, m=4, schedule="interleaved_1f1b", model="mixed", dp=4),
    Case(dtype="bf16", pp=2, dp=2, m=4, schedule="chimera_backward_halving", debug=True),
    Case(dtype="bf16", pp=2, tp=2, m=4, schedule="seq1f1b", slices=3, model="llama", kv_heads=2),
]


@in_parts("case", BF16, full=2, ids=lambda case: case.name)
def test_bf16_is_as_close_to_fp32_as_a_single_process(case: Case) -> None:
    """Gradients of the first step: at most twice the error of plain single-process bf16."""
    (outcomes,) = outcomes_of([case])
    config, _ = configure(plain(case))
    params = reference.init_random(config.model, seed=3)
    settings = reference.Optimizer(lr=[learning_rate(config.optimizer, 0, STEPS)], clip=case.clip)
    batches = [batch_of(plain(case), 0)]
    exact_model = config.model.model_copy(update={"dtype": "fp32"})
    (exact,) = reference.train(params, exact_model, batches, settings)
    (baseline,) = reference.train(params, config.model, batches, settings)
    actual = assemble([o.grads[0] for o in outcomes], exact.grads)
    reference.assert_error_like(actual, baseline.grads, exact.grads)
    assert abs(outcomes[0].losses[0] - exact.loss) < 0.02
    assert abs(outcomes[0].norms[0] / exact.grad_norm - 1) < 0.02


def initial_weights(world: World, case: Case) -> list[Any]:
    config, layout = configure(case)
    return list(local_copies(TrainStep(config, layout, world.mesh(case.grid))))


def whole_weights(case: Case, *layouts: Case) -> dict[str, np.ndarray]:
    """Return the initial weights of one process; each rank of these layouts must have its part of
    them."""
    (alone,) = run_world(1, initial_weights, case)
    full = {name: values for name, _, values in alone}
    for layout in layouts:
        for copies in run_world(layout.world, initial_weights, layout):
            for name, region, values in copies:
                assert np.array_equal(values, full[name][region.inside(whole(full[name].shape))])
    return full


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    case = Case(model="llama", tied=False, vocab=300, dtype="fp32")
    full = whole_weights(case, replace(case, dp=2, tp=4), replace(case, pp=4, tp=2))
    weight = full["layers.0.mlp.up.weight"]
    assert abs(weight.std() / 0.02 - 1) < 0.1
    assert abs(weight.mean()) < 2e-3


def test_initial_experts_do_not_depend_on_who_has_them() -> None:
    case = Case(moe="top 2", dtype="fp32")
    shared = replace(case, dp=2, tp=2, sequence_parallel=True)
    full = whole_weights(case, replace(shared, ep=4), replace(shared, ep=2, etp=2))
    weight = full["layers.0.moe.up.weight"]
    assert len(np.unique(weight)) > 0.99 * weight.size, "experts are drawn each for itself"


def test_a_batch_without_unmasked_tokens() -> None:
    """Loss and gradients are zero, in the reference as in any layout, and nothing divides by 0."""
    case = Case(dp=2, pp=2, m=2, masked=1.0, clip=None)
    (outcomes,) = outcomes_of([case])
    steps, validation = expected(plain(case))
    assert validation == 0
    for outcome in outcomes:
        assert outcome.losses == [0.0] * STEPS
        assert outcome.norms == [0.0] * STEPS
        assert outcome.validation == 0
        for name, region, values in outcome.copies[-1]:
            full = steps[-1].params[name]
            wanted = full[region.inside(whole(tuple(full.shape)))]
            assert np.allclose(values, wanted, rtol=1e-12, atol=0)
