"""Checkpoints of pipelines without a flush: where a run goes on as if it had not stopped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe import TrainStep
from megapipe.checkpoint.reader import Checkpoint
from megapipe.testing import World, WorldError, run_world
from tests.parity import reference, stopped_runs
from tests.parity.async_faults import filled_with_the_newest_versions
from tests.parity.async_ranks import begun, same_parts
from tests.parity.cases import Case, Rows, configure
from tests.parity.outcome import Parts, assemble, own_values
from tests.parity.stopped_runs import Play
from tests.parity.tiers import in_parts

STEPS = 8
CASE = Case(
    pp=3,
    m=1,
    layers=3,
    uneven=True,
    tied=False,
    steps=STEPS,
    batch=1,
    dtype="fp32",
    dropout=0.2,
    in_process=True,
)
GROUPS = replace(CASE, pp=2, m=2, layers=4, schedule="two_group")
KEPT = {
    "stash": replace(CASE, weights="stash", clip_scope="stage"),
    "vertical": replace(
        CASE,
        weights="vertical",
        clip_scope="stage",
        schedule="eager_1f1b",
        look_ahead="staleness",
    ),
    "double_buffer": replace(CASE, weights="double_buffer", m=2, look_ahead=1),
    "double_buffer, tied": replace(CASE, weights="double_buffer", m=2, tied=True),
    "double_group": replace(GROUPS, weights="double_group", clip=None, dtype="bf16"),
    "stash, at first synchronous": replace(
        CASE, weights="stash", clip_scope="stage", synchronous_steps=3
    ),
    "double_buffer, at first synchronous": replace(
        CASE, weights="double_buffer", m=2, synchronous_steps=2
    ),
    "stash, dp 2": replace(
        CASE, weights="stash", clip_scope="stage", pp=2, layers=2, dp=2, in_process=False
    ),
    "double_buffer, tied, tp 2": replace(
        CASE,
        weights="double_buffer",
        pp=2,
        layers=2,
        tp=2,
        in_process=False,
        tied=True,
        look_ahead=1,
        debug=True,
    ),
    "stash, in turns": replace(
        CASE,
        weights="stash",
        clip_scope="stage",
        schedule="1f1b_rr",
        replicas=(2, 1),
        m=2,
        layers=2,
        in_process=False,
    ),
    "double_buffer, in turns": replace(
        CASE, weights="double_buffer", schedule="1f1b_rr", replicas=(1, 2), m=4, layers=2
    ),
}
"""Policies whose checkpoints have what forwards in flight have read."""


def train(
    step: TrainStep, case: Case, first: int, saved: Collection[int], folder: Path
) -> dict[int, float]:
    """Train from step `first` on, and save after some numbers of steps; return the losses."""
    rows, losses = Rows(case), {}
    for i in range(first, case.steps):
        for result in step.train(i, rows, settle=i + 1 in saved):
            losses[result.step] = result.loss
        if i + 1 in saved:
            step.save(folder, i + 1)
    losses |= {result.step: result.loss for result in step.settle()}
    return losses


def stop_and_go(world: World, case: Case, folder: Path, saved: Collection[int]) -> None:
    """Check that runs that resume from the saved steps match the one that did not stop, to the
    bit."""
    whole = begun(world, case)
    losses, values = train(whole, case, 0, saved, folder / "whole"), own_values(whole.optimizer)
    assert [*losses] == [*range(case.steps)]
    for number in saved:
        step = begun(world, case)
        step.load(folder / "whole" / f"step-{number:08d}")
        assert step.streaming is not None
        assert step.streaming.continues
        later = [each for each in saved if each > number]
        found = train(step, case, number, later, folder / f"from {number}")
        assert found == {i: losses[i] for i in range(number, case.steps)}, (
            f"losses after {number} steps"
        )
        same_parts(own_values(step.optimizer), values)


@in_parts(
    "name",
    KEPT,
    full=["stash", "double_buffer, tied, tp 2"],
)
def test_a_run_goes_on_to_the_bit_wherever_it_was_stopped(name: str, tmp_path: Path) -> None:
    case = KEPT[name]
    saved = range(1, STEPS) if case.in_process else (1, 2, 5)
    run_world(case.world, stop_and_go, case, tmp_path, list(saved))


def fill_anew(world: World, case: Case, folder: Path) -> None:
    with filled_with_the_newest_versions():
        stop_and_go(world, case, folder, [3])


def test_a_fill_with_the_newest_versions_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="losses after 3 steps"):
        run_world(1, fill_anew, KEPT["stash"], tmp_path)


LAYOUTS = {"dp 2, pp 2": {"dp": 2, "pp": 2}, "tp 2, pp 2": {"tp": 2, "pp": 2}, "pp 4": {"pp": 4}}


def laid_out(weights: str, layout: str) -> Case:
    """Return a case of 10 windows of one micro-batch, or of as few as the policy takes."""
    sizes = LAYOUTS[layout]
    case = replace(CASE, weights=weights, **sizes, clip_scope="stage", steps=10, in_process=False)
    if weights in ("double_buffer", "double_group"):
        case = replace(case, m=max(1, case.pp - 1))
    if weights == "double_group":
        case = replace(case, schedule="two_group")
    return replace(case, layers=case.pp * (1 + (weights == "double_group")))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", ["stash", "vertical", "double_buffer", "double_group"])
def test_ten_windows_may_be_stopped_behind_each(weights: str, layout: str, tmp_path: Path) -> None:
    case = laid_out(weights, layout)
    run_world(case.world, stop_and_go, case, tmp_path, list(range(1, 10)), timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", ["latest", "predict", "correct"])
def test_ten_windows_may_be_stopped_at_regular_checkpoints(
    weights: str, layout: str, tmp_path: Path
) -> None:
    case = laid_out(weights, layout)
    run_world(case.world, stop_and_go, case, tmp_path, [2, 4, 6, 8], timeout_s=600)


SETTINGS = {
    "stash": {"train.microbatch": "4", "optimizer.clip_scope": "stage"},
    "vertical": {"train.microbatch": "4", "optimizer.clip_scope": "stage"},
    "double_buffer": {},
    "double_group": {"pipeline.schedule": "two_group", "optimizer.clip_scope": "stage"},
}
"""Settings by policy, with a window of one micro-batch if that is possible."""


@pytest.mark.slow
@pytest.mark.parametrize("weights", SETTINGS)
def test_a_run_that_was_killed_or_told_to_stop_goes_on(weights: str, tmp_path: Path) -> None:
    settings = {
        **stopped_runs.DP,
        "model.tied_embeddings": "false",
        "pipeline.weight_versions": weights,
        "train.steps": "10",
        "checkpoint.every": "1",
        "checkpoint.keep": "20",
        **SETTINGS[weights],
    }
    plays = [Play("whole", settings)]
    for end in range(1, 10):
        plays += [Play(f"killed-{end}", settings, stop_after=end), Play(f"killed-{end}", settings)]
        plays += [Play(f"told-{end}", settings, preempt=end), Play(f"told-{end}", settings)]
    whole, *others = stopped_runs.run(tmp_path, *plays)
    for parts in others[1::2]:
        assert parts[0]["first_step"] > 0
        stopped_runs.assert_continues(parts, whole, 10)


FORGOTTEN = {
    "latest": replace(CASE, weights="latest", clip_scope="stage"),
    "predict": replace(CASE, weights="predict", clip_scope="stage"),
    "correct": replace(CASE, weights="correct", clip_scope="stage", lr_anneal_steps=4),
    "correct, at first synchronous": replace(
        CASE, weights="correct", clip_scope="stage", synchronous_steps=3, lr_anneal_steps=4
    ),
    "correct, dp 2": replace(
        CASE, weights="correct", clip=None, pp=2, layers=2, dp=2, in_process=False
    ),
}


@in_parts("name", FORGOTTEN, default=["correct"], full=["correct, dp 2"])
def test_without_older_versions_it_goes_on_from_regular_checkpoints(
    name: str, tmp_path: Path
) -> None:
    case = FORGOTTEN[name]
    run_world(case.world, stop_and_go, case, tmp_path, [2, 5])


def save_and_change(world: World, folder: Path) -> None:
    """Check that others, and synchronous training, read a checkpoint of one policy."""
    case = KEPT["stash"]
    step = begun(world, case)
    train(step, case, 0, [4], folder)
    checkpoint = Checkpoint.open(folder / "step-00000004")
    kinds = {name.partition("/")[0] for name in checkpoint.names()}
    assert kinds >= {"model", "optimizer.exp_avg", "stash.1", "stash.2"}
    early = [name for name in checkpoint.names() if name.startswith("stash.2/")]
    assert early
    assert all("layers.0" in name or "embedding" in name for name in early)
    for other in (
        KEPT["vertical"],
        replace(case, pp=1),
        replace(case, m=2, batch=1),
        replace(case, weights="synchronous", clip_scope="global"),
    ):
        fresh = begun(world, other)
        fresh.load(checkpoint.path)
        assert fresh.streaming is None or not fresh.streaming.continues
        rows = Rows(replace(case, m=1))
        known = [*fresh.train(4, rows), *fresh.settle()]
        assert all(torch.isfinite(torch.tensor(result.loss)) for result in known)
        assert {result.step for result in known} == {4}


@pytest.mark.full
def test_others_read_its_checkpoints_and_fill_anew(tmp_path: Path) -> None:
    run_world(1, save_and_change, tmp_path)


VELOCITY = "optimizer.stream.velocity"


def go_elsewhere(world: World, folder: Path) -> None:
    """Three stages, two of which are stale, become two, one of which is; and back."""
    three = replace(FORGOTTEN["correct"], steps=4)
    two = replace(three, pp=2)
    found = {}
    for name, case in {"three": three, "two": two}.items():
        step = begun(world, case)
        train(step, case, 0, [4], folder / name)
        found[name] = own_values(step.optimizer)[VELOCITY]
    for name, case in {"two": two, "three": three}.items():
        source = "three" if name == "two" else "two"
        step = begun(world, case)
        train(step, case, 0, [], folder)  # has velocities of its own, which are forgotten
        step.load(folder / source / "step-00000004")
        kept = {each for each, *_ in found[source]}
        assert any("embedding" in each for each in kept)
        velocity = own_values(step.optimizer)[VELOCITY]
        stale = {each for each, *_ in velocity}
        fresh = {each for each in stale if each.startswith("layers.1")}
        assert stale - kept == (fresh if name == "three" else set())
        same_parts(
            {VELOCITY: [part for part in velocity if part[0] in kept]}, {VELOCITY: found[source]}
        )
        for each, _, values in velocity:
            assert each in kept or not values.any()


@pytest.mark.full
def test_velocities_go_where_their_weights_go(tmp_path: Path) -> None:
    run_world(1, go_elsewhere, tmp_path)


OTHERS = {
    "stash": (KEPT["stash"], {"pp": 2}),
    "vertical": (KEPT["vertical"], {"tp": 2}),
    "double_buffer": (KEPT["double_buffer"], {"pp": 2}),
    "double_group": (KEPT["double_group"], {"pp": 1, "dp": 2}),
    "latest": (replace(CASE, weights="latest", clip_scope="stage"), {"pp": 2}),
    "predict": (replace(CASE, weights="predict", clip_scope="stage"), {"tp": 2, "pp": 1}),
    "correct": (FORGOTTEN["correct"], {"pp": 2}),
}
"""Each policy, and another layout."""


def save_at_four(world: World, case: Case, folder: Path) -> dict[str, Parts]:
    step = begun(world, case)
    for i in range(4):
        step.train(i, Rows(case), settle=i == 3)
    values = own_values(step.optimizer)
    step.save(folder, 4)
    return values


def take_over(
    world: World, case: Case, folder: Path, same_stages: bool
) -> tuple[dict[str, Parts], list[float]]:
    """Return master weights and states as loaded, and the losses of the steps from there. Older
    versions are loaded too if stages are the `same_stages`."""
    step = begun(world, case)
    step.load(folder / "step-00000004")
    assert step.streaming is not None
    forgets = case.weights in ("latest", "predict", "correct")
    assert step.streaming.continues == (forgets or same_stages)
    values, known = own_values(step.optimizer), []
    for i in range(4, case.steps):
        known += step.train(i, Rows(case))
    return values, [result.loss for result in (*known, *step.settle())]


@in_parts("weights", OTHERS, full=3)
def test_another_layout_takes_masters_and_states(weights: str, tmp_path: Path) -> None:
    """For velocities see test_velocities_go_where_their_weights_go."""
    case, changes = OTHERS[weights]
    other = replace(case, **changes)  # type: ignore[arg-type]
    (saved,) = run_world(1, save_at_four, case, tmp_path)
    ranks = run_world(other.world, take_over, other, tmp_path, case.pp == other.pp)
    params = reference.init_random(configure(case)[0].model, seed=3)
    for kind in {kind for kind in saved if kind[:6] != "stash."} - {VELOCITY}:
        wanted = assemble([saved[kind]], params)
        found = assemble([values.get(kind, []) for values, _ in ranks], params)
        assert all(found[name].equal(tensor) for name, tensor in wanted.items()), kind
    for _, losses in ranks:
        assert len(losses) == case.steps - 4
        assert torch.tensor(losses).isfinite().all()
