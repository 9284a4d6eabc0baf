"""Steps that are taken on trust and validated later are, bitwise, those of a run that waits."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.errors import NumericError
from megapipe.layout.resolve import resolve
from megapipe.optim.loss_scaler import LossScaler
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import StateStore
from megapipe.plan.measurements import BY_UNITS
from megapipe.testing import World, WorldError, run_world
from megapipe.train.moe.routing_state import RoutingState
from megapipe.train.step.post_validation import PostValidation
from megapipe.train.update import StepResult
from tests.parity import reference
from tests.parity.ranks import Case, Rows, configure, take_region
from tests.parity.stopped_runs import DP, HALF, Play, assert_same_files, checkpoint, run
from tests.parity.stopped_runs import STEPS as JOB_STEPS
from tests.parity.tiers import in_parts, one_of

STEPS = 6
Poison = Mapping[tuple[int, int], float]
"""What one gradient becomes, by step and rank."""


@dataclass(frozen=True)
class Run:
    """A case, with what is to happen in it."""

    case: Case
    clip: float | None = None
    poison: Poison = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS


@dataclass
class Outcome:
    """What a rank sees of a run."""

    results: list[StepResult] = field(default_factory=list)
    bits: dict[str, str] = field(default_factory=dict)
    """Digests of this rank's weights, and of its shards of master weights and states."""
    count: int = 0
    """Number of updates that the optimizer made."""
    scaler: Mapping[str, float] = field(default_factory=dict)
    undone: int | None = None
    error: str | None = None


def poisoned(poison: Poison, rank: int, now: list[int]) -> AbstractContextManager[Any]:
    """Change one value among the gradients of a rank before they are sent."""
    start = Shard.start_reduce

    def changed(self: Shard) -> None:
        value = poison.get((now[0], rank))
        if value is not None:
            grads = self.bucket.grads[0]
            grads[self.bucket.entries[-1].stop // 2] = value
        start(self)

    return mock.patch.object(Shard, "start_reduce", changed)


def begin(world: World, this: Run, *, trust: bool) -> TrainStep:
    """Begin a run with validation before the update, or after it with `trust`."""
    case = this.case
    settings = configure(case)[0].model_dump()
    settings["train"]["steps"] = this.steps
    settings["health"] |= {"replay": False}  # what is poisoned is the turn and not the step
    settings["optimizer"] |= {
        "max_grad_norm": this.clip,
        "post_validation": trust,
        **this.optimizer,
    }
    config = Config.model_validate(settings)
    config, layout = resolve(config, case.world, case.vocab, measure=BY_UNITS)
    step = TrainStep(config, layout, world.mesh(case.grid))
    params = reference.init_random(config.model, seed=3)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    return step


def trained(world: World, this: Run, *, trust: bool) -> Outcome:
    """Train the steps of a run."""
    step = begin(world, this, trust=trust)
    outcome, rows, now = Outcome(), Rows(this.case), [0]
    with poisoned(this.poison, world.rank, now):
        try:
            for now[0] in range(this.steps):
                outcome.results += step.train(now[0], rows)
            outcome.results += step.settle()
        except NumericError as error:
            outcome.error = str(error)
    of_run = {"memory_gib": 0.0, "seconds": 0.0}
    outcome.results = [replace(result, **of_run) for result in outcome.results]
    outcome.bits = bits_of(step)
    outcome.count = step.optimizer.count
    outcome.scaler = step.scaler.state()
    outcome.undone = None if step.post_validation is None else step.post_validation.undone
    return outcome


def bits_of(step: TrainStep) -> dict[str, str]:
    """Return digests of what a rank has; see :attr:`Outcome.bits`."""
    step.optimizer.await_all_weights()
    bits = {
        f"weights of stage {stage}: {name}": digest(parameter.detach())
        for stage, module in step.modules.items()
        for name, parameter in module.named_parameters()
    }
    for piece in step.routing.tensors():
        bits[piece.name] = digest(piece.tensor)
    for own in step.optimizer.own_slices():
        for kind, values in own.values.items():
            bits[f"{kind} {own.spec.name} {own.spec.use}"] = digest(values)
    return bits


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def both(world: World, runs: list[Run]) -> list[tuple[Outcome, Outcome]]:
    """Train each run with validation before the update, and after it."""
    return [(trained(world, r, trust=False), trained(world, r, trust=True)) for r in runs]


def alone(world: World, this: Run) -> Outcome:
    return trained(world, this, trust=False)


def must_wait(result: StepResult, clip: float | None) -> bool:
    """Whether an update by these gradients clips, or is skipped."""
    return not math.isfinite(result.grad_norm) or (clip is not None and result.grad_norm > clip)


def assert_alike(this: Run, before: Outcome, after: Outcome) -> None:
    assert [repr(r) for r in after.results] == [repr(r) for r in before.results]  # nan is nan
    assert after.error == before.error
    assert (after.count, after.scaler) == (before.count, before.scaler)
    assert list(after.bits) == list(before.bits)
    for name, bits in before.bits.items():
        assert after.bits[name] == bits, name
    undone = sum(must_wait(result, this.clip) for result in before.results)
    assert after.undone == undone + (before.error is not None)


BASE = Case(pp=2, dp=2, m=4, batch=1)
SCHEDULES = [
    replace(BASE, schedule="zb_h1"),
    replace(BASE, schedule="zb_2p", tied=False),
    replace(BASE, schedule="zb_v"),
    replace(BASE, schedule="chimera"),
    replace(BASE, schedule="interleaved_1f1b", chunks=2),
]
TYPES = ("fp32", "bf16", "fp16")
CASES = [
    replace(case, dtype=dtype, zero=(i + j) % 3)
    for (i, case), (j, dtype) in product(enumerate(SCHEDULES), enumerate(TYPES))
]
"""Runs of each schedule with each type; each of both has each ZeRO stage."""
FURTHER = [
    (replace(BASE, pp=4, dp=1, m=8, schedule="zb_2p", dtype="bf16"), {}),
    (replace(BASE, tp=2, dp=1, m=8, sequence_parallel=True, dtype="fp16"), {}),
    (replace(BASE, schedule="seq1f1b", slices=2, dtype="fp16", shard_size=1), {}),
    (replace(BASE, schedule="gpipe", dtype="fp16"), {"rule": "lion"}),
    (replace(BASE, dtype="fp32"), {"rule": "sgd"}),
    (replace(BASE, dtype="bf16"), {"state_dtype": "bf16", "master_weights": "none"}),
    (replace(BASE, dtype="fp16", debug=True), {"reduce_dtype": "bf16"}),
]


EXPERTS = [
    replace(BASE, moe="top 2", ep=2, schedule="zb_h1", zero=2, dtype="fp32"),
    replace(BASE, moe="capacity, choice", etp=2, schedule="chimera", dtype="fp16", tied=False),
    replace(BASE, moe="pyramid", dp=1, m=8, tp=2, sequence_parallel=True, ep=2, dtype="fp16"),
    replace(BASE, moe="step", schedule="zb_2p", ep=2, tied=False, dtype="bf16"),
    replace(BASE, moe="step, first", schedule="chimera", dtype="fp32"),
    replace(BASE, moe="groups", dp=1, m=8, tp=2, sequence_parallel=True, dtype="fp16"),
]
"""Cases of MoE layers; in the last three, biases and counts of choices go from step to step."""


def norm_to_clip(**like: Any) -> float:
    """Return a norm that half of the model's steps exceed; layouts and types hardly change it."""
    one = Case(pp=1, dp=1, m=8, batch=1, dtype="fp32", **like)
    (outcome,) = run_world(1, alone, Run(one))
    return statistics.median(result.grad_norm for result in outcome.results)


@pytest.fixture(scope="module")
def norms() -> dict[bool, float]:
    """Return the norms to clip by, by whether embeddings are tied."""
    return {tied: norm_to_clip(tied=tied) for tied in (True, False)}


def with_mishaps(case: Case, norms: Mapping[bool, float], seed: int, **settings: Any) -> Run:
    """Have fp16 meet values that are not finite, in two steps on any ranks."""
    draw = random.Random(seed)
    poison = {
        (step, draw.randrange(case.world)): draw.choice([math.inf, -math.inf, math.nan])
        for step in (draw.sample(range(STEPS), 2) if case.dtype == "fp16" else ())
    }
    return Run(case, norms[case.tied], poison, settings)


def check(runs: Sequence[Run]) -> None:
    ranks = run_world(4, both, runs, timeout_s=60 + 10 * len(runs))
    for this, outcomes in zip(runs, zip(*ranks, strict=True), strict=True):
        for before, after in outcomes:
            assert before.error is None
            waits = [must_wait(result, this.clip) for result in before.results]
            assert len(waits) == this.steps
            assert 0 < sum(waits) < this.steps, "some clip, some do not"
            skipped = sum(not math.isfinite(result.grad_norm) for result in before.results)
            assert skipped == len(this.poison)
            try:
                assert_alike(this, before, after)
            except AssertionError as error:
                error.add_note(f"{this}")
                raise


@one_of(8)
def test_clipping_and_values_that_are_not_finite(norms: dict[bool, float], some: slice) -> None:
    check([with_mishaps(case, norms, seed) for seed, case in enumerate(CASES)][some])


@pytest.mark.slow
def test_further_layouts_rules_and_states(norms: dict[bool, float]) -> None:
    check(
        [
            with_mishaps(case, norms, 100 + seed, **settings)
            for seed, (case, settings) in enumerate(FURTHER)
        ]
    )


@one_of(6)
def test_layers_with_experts(some: slice) -> None:
    """A choice of what is undone is made again."""
    check(
        [
            with_mishaps(case, {case.tied: norm_to_clip(moe=case.moe, tied=case.tied)}, 300 + i)
            for i, case in [*enumerate(EXPERTS)][some]
        ]
    )


@pytest.mark.full
@in_parts(("schedule", "dtype"), [("zb_v", "fp16"), ("zb_h1", BASE.dtype)], default=2)
def test_fifty_steps(schedule: str, dtype: str, norms: dict[bool, float]) -> None:
    case = replace(BASE, schedule=schedule, dtype=dtype)
    check([replace(with_mishaps(case, norms, 200), steps=50)])


@pytest.mark.full
def test_a_value_that_is_not_finite_is_the_same_error_on_all_ranks() -> None:
    """In fp32 and bf16: of the same step, and weights and states are those before it."""
    runs = [
        Run(replace(BASE, dtype=dtype, schedule="zb_h1"), 1.0, {(at, rank): math.nan})
        for dtype, at, rank in (("fp32", 2, 3), ("bf16", 0, 0), ("fp32", STEPS - 1, 1))
    ]
    for this, outcomes in zip(runs, zip(*run_world(4, both, runs), strict=True), strict=True):
        ((at, _),) = this.poison
        errors = {outcome.error for pair in outcomes for outcome in pair}
        (error,) = errors
        assert error is not None
        assert error.startswith(f"step {at + 1}: ")
        assert "gradients of stages" in error
        for before, after in outcomes:
            assert_alike(this, before, after)


@pytest.mark.full
def test_steps_that_are_all_plain_are_never_undone() -> None:
    this = Run(replace(BASE, dtype="fp32"), clip=1e9)
    for ((before, after),) in run_world(4, both, [this]):
        assert after.undone == 0
        assert after.count == STEPS
        assert_alike(this, before, after)


def states_are_forgotten() -> AbstractContextManager[Any]:
    """Have a restore undo the weights alone."""
    undo = StateStore.restore

    def wrong(self: StateStore) -> None:
        states = [array.values.clone() for array in self._arrays[1:]]
        undo(self)
        for array, values in zip(self._arrays[1:], states, strict=True):
            array.values.copy_(values)

    return mock.patch.object(StateStore, "restore", wrong)


def weights_are_forgotten() -> AbstractContextManager[Any]:
    """Have the weights keep the update that the master weights have lost, until the next one."""
    undo = StateStore.restore

    def wrong(self: StateStore) -> None:
        weights = self.weights.clone()
        undo(self)
        self.weights.copy_(weights)

    return mock.patch.object(StateStore, "restore", wrong)


def updates_are_counted_twice() -> AbstractContextManager[Any]:
    undo = Optimizer.restore

    def wrong(self: Optimizer) -> None:
        count = self.count
        undo(self)
        self.count = count

    return mock.patch.object(Optimizer, "restore", wrong)


def the_prefix_is_not_aborted() -> AbstractContextManager[Any]:
    """Have the step go on from what forwards with the wrong weights have made."""
    validate = PostValidation._validate

    def wrong(self: PostValidation, abort: Any) -> Any:
        return validate(self, lambda: None)[0], True

    return mock.patch.object(PostValidation, "_validate", wrong)


def the_loss_scale_is_not_put_back() -> AbstractContextManager[Any]:
    return mock.patch.object(LossScaler, "load")


def choices_move_nothing_ahead() -> AbstractContextManager[Any]:
    return mock.patch.object(RoutingState, "update_speculatively")


def choices_are_not_taken_back() -> AbstractContextManager[Any]:
    return mock.patch.object(RoutingState, "restore")


def choices_that_hold_count_twice() -> AbstractContextManager[Any]:
    return mock.patch.object(
        RoutingState, "confirm", lambda self, told: self._move(told, self._experts)
    )


def choices_of_other_holders_are_left_out() -> AbstractContextManager[Any]:
    def wrong(self: PostValidation, vector: torch.Tensor) -> Any:
        return [(shared.layers, self._totals.unpack(vector).routing) for shared in self._layers]

    return mock.patch.object(PostValidation, "_known", wrong)


FAULTS = [
    states_are_forgotten,
    weights_are_forgotten,
    updates_are_counted_twice,
    the_loss_scale_is_not_put_back,
]
OF_CHOICES = [
    choices_move_nothing_ahead,
    choices_are_not_taken_back,
    choices_that_hold_count_twice,
]


def faulty(world: World, this: Run, faults: Sequence[Any]) -> tuple[Outcome, dict[str, Outcome]]:
    """Train the run that waits and, once for each fault, the one that does not."""
    after = {}
    for fault in (nullcontext, *faults):
        with fault():
            after[fault.__name__] = trained(world, this, trust=True)
    return trained(world, this, trust=False), after


def is_alike(this: Run, before: Outcome, after: Outcome) -> bool:
    try:
        assert_alike(this, before, after)
    except AssertionError:
        return False
    return True


def fault_case(norms: dict[bool, float]) -> Run:
    """After two good steps the loss scale is doubled, so it has to be put back, too."""
    case = replace(BASE, dp=1, m=8, schedule="zb_h1", dtype="fp16")
    return Run(case, norms[True], {(1, 1): math.inf}, {"loss_scale_window": 2})


def check_faults(this: Run, faults: Sequence[Any]) -> None:
    ranks = run_world(2, faulty, this, faults)
    for before, after in ranks:
        assert_alike(this, before, after["nullcontext"])
    for fault in faults:
        found = [is_alike(this, before, after[fault.__name__]) for before, after in ranks]
        assert not all(found), fault.__name__


@pytest.mark.full
def test_faults_are_noticed(norms: dict[bool, float]) -> None:
    check_faults(fault_case(norms), FAULTS)


@in_parts(
    ("schedule", "faults"),
    [("zb_h1", OF_CHOICES), ("chimera", [choices_of_other_holders_are_left_out])],
)
def test_faults_of_what_goes_by_choices_are_noticed(schedule: str, faults: list[Any]) -> None:
    case = replace(BASE, dp=1, m=8, schedule=schedule, dtype="fp32", moe="step")
    check_faults(Run(case, norm_to_clip(moe="step")), faults)


def with_its_prefix(world: World, this: Run) -> Outcome:
    with the_prefix_is_not_aborted():
        return trained(world, this, trust=True)


@pytest.mark.full
def test_a_prefix_that_is_not_aborted_is_noticed(norms: dict[bool, float]) -> None:
    """Autograd notices it, as it knows that the weights have changed."""
    with pytest.raises(WorldError, match="modified by an inplace operation"):
        run_world(2, with_its_prefix, fault_case(norms))


def loaded(world: World, this: Run, folder: Path) -> tuple[list[int], dict[str, str]]:
    """Train steps 0 and 1, then load what was saved after the first, and train step 1 again; return
    the steps of its results, and the bits."""
    step, rows = begin(world, this, trust=True), Rows(this.case)
    step.train(0, rows, settle=True)
    step.save(folder, 1)
    step.train(1, rows)
    step.load(folder)
    results = step.train(1, rows, settle=True)
    return [result.step for result in results], bits_of(step)


def test_a_step_that_is_open_is_forgotten_where_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Biases that have moved ahead too."""
    this = Run(replace(BASE, dp=1, dtype="fp32", moe="step"), steps=2)
    found = run_world(2, loaded, this, tmp_path)
    for (steps, bits), plain in zip(found, run_world(2, alone, this), strict=True):
        assert steps == [1]
        assert bits == plain.bits


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_a_run_that_stops_and_goes_on(dtype: str, tmp_path: Path) -> None:
    """Bitwise the one that does not stop, and the one that waits."""
    given = {
        **DP,
        "model.dtype": dtype,
        "pipeline.schedule": "zb_h1",
        "optimizer.max_grad_norm": "1.0",
    }
    trust = {**given, "optimizer.post_validation": "true"}
    run(
        tmp_path,
        Play("waits", given),
        Play("full", trust),
        Play("parts", trust, stop_after=HALF),
        Play("parts", trust),
    )
    for step in (HALF, JOB_STEPS):
        first = checkpoint(tmp_path, "waits", step)
        for name in ("full", "parts"):
            assert_same_files(first, checkpoint(tmp_path, name, step))
    lines = (tmp_path / "runs/waits/log.jsonl").read_text().splitlines()
    steps = [x for x in map(json.loads, lines) if x["kind"] == "step"]
    assert len(steps) == JOB_STEPS
    assert any(x["grad_norm"] > 1.0 for x in steps[HALF:]), "some clip after going on"
    for name in ("full", "parts"):
        lines = (tmp_path / f"runs/{name}/log.jsonl").read_text().splitlines()
        again = [x for x in map(json.loads, lines) if x["kind"] == "step"]
        for key in ("step", "loss", "grad_norm", "lr"):
            assert [x[key] for x in again] == [x[key] for x in steps]
