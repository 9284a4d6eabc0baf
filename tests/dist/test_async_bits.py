"""Where training without a flush is to the bit what something simpler computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest
from torch import Tensor

from megapipe.testing import World, run_world
from megapipe.train.async_training import async_training
from tests.parity.async_ranks import begun, run_stale, same_parts
from tests.parity.cases import Case, Rows, configure
from tests.parity.outcome import Outcome, Parts, own_values
from tests.parity.ranks import run_case
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

CASE = Case(
    weights="stash",
    clip_scope="stage",
    pp=2,
    m=2,
    layers=3,
    uneven=True,
    tied=False,
    steps=8,
    batch=1,
    dropout=0.2,
    dtype="fp32",
)
Result = tuple[dict[int, float], dict[int, float], dict[str, Parts]]
"""Losses and norms by step, and masters and states at the end."""


def run_stream(world: World, case: Case) -> Result:
    outcome = run_stale(world, case)
    kinds = outcome.values[-1].items()
    return outcome.losses, outcome.norms, {k: of for k, of in kinds if k[:6] != "stash."}


def check_same(some: Result, other: Result) -> None:
    assert some[0] == other[0]
    assert some[1] == other[1]
    same_parts(some[2], other[2])
    same_parts(other[2], some[2])


def run_plainly(world: World, case: Case) -> Outcome:
    return run_case(world, case, validate=False)


ALONE = {
    "dp 2": {"dp": 2, "rule": "muon"},
    "tp 2": {"tp": 2, "sequence_parallel": True},
    "bf16": {"dtype": "bf16", "state_dtype": "bf16", "activations": "full"},
}


@pytest.mark.parametrize(
    "more",
    [pytest.param(name, marks=pytest.mark.slow) if name != "dp 2" else name for name in ALONE],
)
@in_parts("weights", ["stash", "vertical", "latest"], full=["stash"])
def test_one_stage_trains_as_synchronous_training_does(weights: str, more: str) -> None:
    given = {"activations": "keep"} if weights == "latest" else {}
    case = replace(CASE, weights=weights, pp=1, uneven=False, **{**ALONE[more], **given})  # type: ignore[arg-type]
    plain = replace(case, weights="synchronous", clip_scope="global")
    streams = run_world(case.world, run_stream, case)
    for found, wanted in zip(streams, run_world(case.world, run_plainly, plain), strict=True):
        assert [*found[0].values()] == wanted.losses
        assert [*found[1].values()] == wanted.norms
        same_parts(wanted.values[-1], found[2])


PREDICTED = replace(CASE, weights="predict", pp=3, m=1, in_process=True)


def without_prediction(world: World, case: Case) -> Result:
    """Run with s = 0 wherever weights are predicted."""
    predict = async_training.predict

    def here(rule: object, shard: object, distance: float, count: int, out: Tensor) -> None:
        predict(rule, shard, 0.0, count, out)  # type: ignore[arg-type]

    with mock.patch.object(async_training, "predict", here):
        return run_stream(world, case)


@pytest.mark.parametrize(
    "dtype", ["fp32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("fp64", "bf16"))]
)
@pytest.mark.parametrize("horizon", ["update", "round_trip"])
def test_predicted_by_nothing_is_not_predicted(horizon: str, dtype: str) -> None:
    case = replace(PREDICTED, horizon=horizon, dtype=dtype)
    (found,) = run_world(1, without_prediction, case)
    (wanted,) = run_world(1, run_stream, replace(case, weights="latest", horizon="update"))
    check_same(found, wanted)
    (predicted,) = run_world(1, run_stream, case)
    assert predicted[0] != wanted[0]


def predictions_of(world: World, case: Case) -> list[int]:
    """Return how many versions each stage predicted."""
    step, made = begun(world, case), dict[int, int]()
    predict = async_training.predict

    def count(rule: object, shard: object, *given: object) -> None:
        stage = shard.bucket.index  # type: ignore[attr-defined]
        made[stage] = made.get(stage, 0) + 1
        predict(rule, shard, *given)  # type: ignore[arg-type]

    with mock.patch.object(async_training, "predict", count):
        for i in range(case.steps):
            step.train(i, Rows(case))
    return [made.get(stage, 0) for stage in range(case.pp)]


def test_the_last_stage_predicts_nothing() -> None:
    """The last stage's weights are as new as its updates, so that s = 0."""
    (made,) = run_world(1, predictions_of, PREDICTED)
    assert made[-1] == 0
    assert min(made[:-1]) > 0


TOGETHER = [
    replace(CASE, weights="predict", m=1),
    replace(CASE, weights="predict", pp=3, horizon="round_trip", rule="sgd", dtype="bf16"),
    replace(CASE, dp=2, m=1, rule="lion", reduce_chunk_mib=0.001),
    replace(CASE, weights="double_buffer", clip_scope="global", tp=2, rule="nadamw"),
]


@in_parts("case", TOGETHER, full=6, ids=lambda case: f"{case.weights}, {case.rule}")
def test_one_process_trains_as_several_do(case: Case) -> None:
    apart = run_world(case.world, run_stream, case)
    one = replace(case, in_process=True)
    together = run_world(one.world, run_stream, one)
    for found in apart:
        assert found[:2] == together[0][:2]
    of_all: dict[str, Parts] = {}
    for _, _, values in together:
        for kind, parts in values.items():
            of_all.setdefault(kind, []).extend(parts)
    for _, _, values in apart:
        same_parts(values, of_all)


def delayed(world: World, case: Case) -> Result:
    """Train synchronously with the gradients of the weights one update before. In bf16 master
    weights are apart from the weights, so that these can be overwritten."""
    assert configure(case)[0].model.dtype == "bf16"
    step = begun(world, case)
    buckets = [shard.bucket for shard in step.optimizer.shards]
    older = [bucket.weights.clone() for bucket in buckets]
    losses, norms = {}, {}
    for i in range(case.steps):
        newer = [bucket.weights.clone() for bucket in buckets]
        for bucket, weights in zip(buckets, older, strict=True):
            bucket.weights.copy_(weights)
        older = newer
        for result in (*step.train(i, Rows(case)), *step.settle()):
            losses[result.step], norms[result.step] = result.loss, result.grad_norm
        step.optimizer.await_all_weights()
    return losses, norms, own_values(step.optimizer)


DELAYED: Mapping[str, dict[str, object]] = {
    "pp 1": {"pp": 1, "uneven": False, "m": 3},
    "pp 3": {"pp": 3, "m": 2, "rule": "muon"},
    "pp 4": {"pp": 4, "m": 5, "rule": "lamb"},
}


@in_parts("more", DELAYED, full=["pp 4"])
def test_a_double_buffer_is_an_optimizer_with_a_delay_of_one(more: str) -> None:
    case = replace(CASE, weights="double_buffer", clip_scope="global", dtype="bf16")
    case = replace(case, in_process=True, layers=4, **DELAYED[more])  # type: ignore[arg-type]
    (found,) = run_world(1, run_stream, case)
    (wanted,) = run_world(1, delayed, replace(case, weights="synchronous", clip_scope="global"))
    check_same(found, wanted)
