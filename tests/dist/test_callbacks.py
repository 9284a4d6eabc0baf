"""User callbacks in real runs: when they are called, and what they can bring about."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megapipe import TrainStep
from megapipe.cli import parse
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Grid
from megapipe.errors import CallbackError, MegapipeError, Preempted
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.observe.record import ValidationRecord
from megapipe.testing import World, run_world
from megapipe.train.callbacks import Callback, RankRequests, Run, Step
from megapipe.train.trainer import Trainer
from megapipe.train.update import StepResult
from tests.parity.jobs import ROOT, Outcome, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.ranks import Case, Rows, configure
from tests.parity.tiers import in_parts

PP2 = {"parallel.pp": "2", "train.steps": "5"}


@dataclass
class Seen:
    """What a rank has seen of a run."""

    hooks: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """Loss of each step; steps are counted from 1, as in `validations`."""
    validations: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)
    """Files in the run folder at each call, without reports."""
    records: int = 0
    error: MegapipeError | None = None


class Spy(Callback):
    """Writes down each call, and does and asks for what its class says."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def saw(self, run: Run, what: str) -> None:
        self.seen.hooks.append(what)
        saved = (path.name for path in run.folder.glob("checkpoints/step-*"))
        self.seen.files[what] = sorted([*saved, *(p.name for p in run.folder.glob("summary.json"))])

    def begin(self, run: Run) -> None:
        self.saw(run, f"begin after {run.first_step}")

    def before_step(self, run: Run, step: Step) -> None:
        self.saw(run, f"before {step.number}" + " of the last" * step.last)

    def requests(self, run: Run) -> RankRequests:
        self.saw(run, "requests")
        return RankRequests()

    def after_step(self, run: Run, step: Step) -> None:
        known = [result.step + 1 for result in step.results]
        self.saw(run, f"after {step.number} with {known}")
        self.seen.losses.update({result.step + 1: result.loss for result in step.results})
        self.seen.seconds += [result.seconds for result in step.results]

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        self.saw(run, f"validated {record.step} of {record.steps}")
        self.seen.validations[record.step] = record.loss

    def before_save(self, run: Run, step: int) -> None:
        self.saw(run, f"saves {step}")

    def end(self, run: Run) -> None:
        self.saw(run, "end")
        run.note(f"the note of rank {run.mesh.rank}")

    def close(self, run: Run) -> None:
        self.saw(run, "close")


class Asks(Spy):
    """Makes every request for step 2, alike on all ranks, and saves at no other one but the end."""

    def before_step(self, run: Run, step: Step) -> None:
        super().before_step(run, step)
        step.record = step.profile = step.validate = step.save = step.number == 2

    def after_step(self, run: Run, step: Step) -> None:
        super().after_step(run, step)
        if step.record:
            self.seen.records = len(run.train_step.records())


class Wisher(Spy):
    """Requests a checkpoint in the first step that it sees and the end in the third, on rank 1 of
    the run named run."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._asked = itertools.count(1)

    def requests(self, run: Run) -> RankRequests:
        asked = next(self._asked)
        here = run.mesh.rank == 1 and run.config.run.name == "run"
        return RankRequests(stop=here and asked == 3, save=here and asked == 1)


class TooLate(Spy):
    """Asks to save in a step that has ended."""

    def after_step(self, run: Run, step: Step) -> None:
        step.save = True


def spied(world: World, settings: Sequence[dict[str, str]], spy: type[Spy]) -> list[Seen]:
    """Run with each of the settings in turn, and return what this rank sees."""
    return [spied_run(world, arguments(each), spy) for each in settings]


def spied_run(world: World, given: list[str], spy: type[Spy]) -> Seen:
    tokenizer = load_tokenizer("byte")
    config, layout = resolve(parse(given).config, world.size, tokenizer.vocab_size)
    mesh = world.mesh(Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp))
    seen = Seen()
    with StopRequest() as stop:
        callbacks = [spy(seen)]
        trainer = Trainer(
            config,
            layout,
            mesh,
            tokenizer,
            local_rank=world.rank,
            stop=stop,
            callbacks=callbacks,
        )
        try:
            trainer.run()
        except MegapipeError as error:
            seen.error = error
        finally:
            trainer.close()
    return seen


def run_spied(
    folder: Path, *settings: dict[str, str], spy: type[Spy] = Spy
) -> list[tuple[Seen, ...]]:
    """Return what the two ranks of each run have seen."""
    given = [{**tiny(folder), **PP2, **each} for each in settings]
    return list(zip(*run_world(2, spied, given, spy), strict=True))


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def turn(step: str, *after: str, known: Sequence[int]) -> list[str]:
    return [f"before {step}", "requests", f"after {step.split()[0]} with {list(known)}", *after]


END = ["validated 5 of 5", "saves 5", "end", "close"]
ORDER = {
    "false": [
        "begin after 0",
        *turn("1", known=[1]),
        *turn("2", "validated 2 of 5", known=[2]),
        *turn("3", "saves 3", known=[3]),
        *turn("4", "validated 4 of 5", known=[4]),
        *turn("5 of the last", *END, known=[5]),
    ],
    "true": [
        "begin after 0",
        *turn("1", known=[]),
        *turn("2", "validated 2 of 5", known=[1, 2]),
        *turn("3", "saves 3", known=[3]),
        *turn("4", "validated 4 of 5", known=[4]),
        *turn("5 of the last", *END, known=[5]),
    ],
}
"""Calls in order, without post-validation and with it."""


@pytest.mark.full
@pytest.mark.parametrize("trust", ["false", "true"])
def test_hooks_are_called_in_order_with_what_the_log_says_on_every_rank(
    trust: str, tmp_path: Path
) -> None:
    settings = {
        "train.validate_every": "2",
        "checkpoint.every": "3",
        "optimizer.post_validation": trust,
    }
    (ranks,) = run_spied(tmp_path, settings)
    log = logged(tmp_path, "run")
    losses = {record["step"]: record["loss"] for record in log if record["kind"] == "step"}
    validations = {r["step"]: r["loss"] for r in log if r["kind"] == "validation"}
    assert sorted(losses) == [1, 2, 3, 4, 5]
    for seen in ranks:
        assert seen.error is None
        assert seen.hooks == ORDER[trust]
        assert seen.losses == losses
        assert seen.validations == validations
        assert len(seen.seconds) == 5
        assert all(0 < seconds < 60 for seconds in seen.seconds)
    notes = [record["text"] for record in log if record["kind"] == "note"]
    assert notes[-1] == "the note of rank 0", "others tell nothing, and the log is closed last"
    files = ranks[0].files
    assert files["saves 3"] == []
    assert files["before 4"] == ["step-00000003"]
    assert files["saves 5"] == ["step-00000003"]
    assert files["end"] == ["step-00000003", "step-00000005", "summary.json"]


@in_parts("trust", ["false", "true"], full=["true"])
def test_requests_are_met_in_their_step(trust: str, tmp_path: Path) -> None:
    (ranks,) = run_spied(tmp_path, {"optimizer.post_validation": trust}, spy=Asks)
    for seen in ranks:
        own = [] if trust == "true" else [1]
        second = "after 2 with [1, 2]" if trust == "true" else "after 2 with [2]"
        start = [
            *("begin after 0", "before 1", "requests"),
            f"after 1 with {own}",
            "before 2",
            "requests",
        ]
        assert seen.hooks[:9] == [*start, second, "validated 2 of 5", "saves 2"]
        assert sorted(seen.validations) == [2, 5]
    assert ranks[0].records > 0
    assert ranks[0].files["end"] == ["step-00000002", "step-00000005", "summary.json"]


@in_parts("trust", ["false", "true"], full=["true"])
def test_what_one_rank_wishes_all_do(trust: str, tmp_path: Path) -> None:
    """With validation after the fact a step later; then the run goes on where it was stopped."""
    settings = {"optimizer.post_validation": trust}
    stopped, whole, again = run_spied(
        tmp_path, settings, {**settings, "run.name": "whole"}, settings, spy=Wisher
    )
    saved, last = (2, 4) if trust == "true" else (1, 3)
    for seen in stopped:
        assert isinstance(seen.error, Preempted)
        assert seen.error.exit_code == 75
        assert str(seen.error) == f"stopped by callback Wisher; saved step {last} of 5"
        saves = [hook for hook in seen.hooks if hook.startswith("saves")]
        assert saves == [f"saves {saved}", f"saves {last}"]
        assert seen.hooks[-1] == "close"
        assert "end" not in seen.hooks
        assert not seen.validations
    for seen, other in zip(again, whole, strict=True):
        assert seen.hooks[0] == f"begin after {last}"
        assert sorted(seen.losses) == list(range(last + 1, 6))
        assert seen.losses.items() <= other.losses.items(), "bitwise as if it had not stopped"


@pytest.mark.full
def test_a_late_request_is_refused_on_all_ranks(tmp_path: Path) -> None:
    settings = {"optimizer.post_validation": "true"}
    (ranks,) = run_spied(tmp_path, settings, spy=TooLate)
    for seen in ranks:
        assert isinstance(seen.error, CallbackError)
        assert "set it in before_step" in str(seen.error)


SCRIPT = """
import functools, os, sys
sys.path.insert(0, {root!r})
from megapipe.errors import DataError
from megapipe.train import job
from megapipe.train.callbacks import Callback, RankRequests
from megapipe.train.main import main
class Mine(Callback):
    def {hook}(self, run, *more):
        if run.mesh.rank == {rank}:
            {action}
        return RankRequests()
job.start = functools.partial(job.start, callbacks=[Mine()])
main(sys.argv[1:])
"""


def job(folder: Path, hook: str, action: str, rank: int = 1) -> Outcome:
    """Run two ranks whose callback does that in a hook of one of them."""
    script = folder / "mine.py"
    script.write_text(SCRIPT.format(root=str(ROOT), hook=hook, action=action, rank=rank))
    given = arguments({**tiny(folder), **PP2, "checkpoint.every": "2"})
    return run_forked(folder, 2, *given, script=str(script))


RAISE = "raise ValueError('no such thing')"


@pytest.mark.parametrize(
    ("hook", "rank"),
    [
        ("after_step", 1),
        pytest.param("begin", 0, marks=pytest.mark.slow),
        pytest.param("before_step", 0, marks=pytest.mark.slow),
        pytest.param("requests", 1, marks=pytest.mark.slow),
        pytest.param("after_validation", 1, marks=pytest.mark.slow),
        pytest.param("before_save", 0, marks=pytest.mark.full),
        pytest.param("end", 1, marks=pytest.mark.slow),
    ],
)
def test_what_a_callback_of_one_rank_raises_ends_all_in_a_line(
    hook: str, rank: int, tmp_path: Path
) -> None:
    outcome = job(tmp_path, hook, RAISE, rank)
    words = f"callback Mine, {hook} on rank {rank}: ValueError: no such thing (mine.py, line 11)"
    outcome.assert_one_line(1, words)
    assert "Traceback" not in outcome.text


@pytest.mark.full
def test_an_error_with_an_exit_code_of_its_own_keeps_it(tmp_path: Path) -> None:
    outcome = job(tmp_path, "after_step", "raise DataError('the table of the callback is empty')")
    outcome.assert_one_line(3, "megapipe: error: the table of the callback is empty")


@pytest.mark.full
def test_a_run_that_a_callback_stops_says_so_once(tmp_path: Path) -> None:
    outcome = job(tmp_path, "requests", "return RankRequests(stop=True)")
    outcome.assert_one_line(75, "stopped by callback Mine; saved step 1 of 5")


@pytest.mark.full
def test_a_callback_that_cannot_be_closed_warns(tmp_path: Path) -> None:
    outcome = job(tmp_path, "close", RAISE)
    assert outcome.codes == [0, 0]
    assert outcome.text.count("callback Mine, close on rank 1: ValueError: no such thing") == 1
    assert "Traceback" not in outcome.text


class Returned(NamedTuple):
    """What :class:`TrainStep` returned, call by call."""

    steps: list[list[int]]
    """Steps with a result, counted from 0."""
    settled: list[bool]
    """Whether the step was settled, after each call."""
    seconds: dict[int, float]


PAUSE_S = 1.0


def returned(world: World, case: Case, slow: int) -> Returned:
    """Train five steps: one waits for its rows, and in the second rank 1 requests a save."""
    config, layout = configure(case)
    data = config.data.model_copy(update={"prefetch": False})  # the step itself is to wait
    config = config.model_copy(update={"data": data})
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp)))
    source, number = Rows(case), 0
    seen = Returned([], [], {})

    def rows(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if number == slow and 0 in [i % source.size for i in indices]:
            time.sleep(PAUSE_S)
        return source(indices)

    def requests() -> RankRequests:
        return RankRequests(save=number == 1 and world.rank == 1)

    def note(results: list[StepResult]) -> None:
        seen.steps.append([result.step for result in results])
        seen.settled.append(step.settled)
        seen.seconds.update({result.step: result.seconds for result in results})

    for number in range(5):
        note(step.train(number, rows, requests=requests))
    note(step.settle())
    note(step.settle())
    return seen


@pytest.mark.deadline
@in_parts(
    ("trust", "slow"),
    [(trust, slow) for slow in (1, 2, 4) for trust in (False, True)],
    full=[(True, 2), (False, 4)],
)
def test_a_result_comes_once_with_the_seconds_of_its_step(trust: bool, slow: int) -> None:
    case = Case(pp=2, post_validation=trust)
    for seen in run_world(2, returned, case, slow):
        if trust:
            assert seen.steps == [[], [0], [1, 2], [], [3], [4], []]
            assert seen.settled == [False, False, True, False, False, True, True]
        else:
            assert seen.steps == [[0], [1], [2], [3], [4], [], []]
            assert seen.settled == [False, True, False, False, False, True, True]
        assert seen.seconds.pop(slow) >= PAUSE_S
        assert len(seen.seconds) == 4
        assert max(seen.seconds.values()) < PAUSE_S
