"""Several callbacks as one: in which order they are called, and whose errors are told how."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe import generate
from megapipe.errors import CallbackError, ConfigError, DataError
from megapipe.observe.record import ValidationRecord
from megapipe.train import callbacks
from megapipe.train.callbacks import Callback, RankRequests, Run, Step
from megapipe.train.callbacks.callback_list import CallbackList, check_callbacks
from megapipe.train.update import StepResult
from tests.unit.train.stub_run import standing_run

HOOKS: dict[str, tuple[Any, ...]] = {
    "begin": (),
    "before_step": (Step(5, last=False),),
    "requests": (),
    "after_step": (Step(5, last=False),),
    "after_validation": (ValidationRecord(5, 10, 2.0, 1.0),),
    "before_save": (5,),
    "after_rewind": (4,),
    "end": (),
    "close": (),
}
"""All hooks, and what they are given besides the run."""
NONE = RankRequests()


def noting(
    name: str, seen: list[tuple[Any, ...]], requests: RankRequests | None = NONE
) -> Callback:
    """Make a callback that notes what it is called with."""

    def note(hook: str) -> Any:
        def called(self: Callback, run: Run, *given: Any) -> RankRequests | None:
            seen.append((name, hook, *given))
            return requests if hook == "requests" else None

        return called

    made: Callback = type(name, (Callback,), {hook: note(hook) for hook in HOOKS})()
    return made


def raising(hook: str, error: BaseException) -> Callback:
    def fail(self: Callback, run: Run, *_: Any) -> None:
        raise error

    made: Callback = type("Broken", (Callback,), {hook: fail})()
    return made


def test_there_is_no_other_hook_and_none_has_to_be_written(tmp_path: Path) -> None:
    public = {name for name in vars(Callback) if not name.startswith("_")}
    assert public == {*HOOKS, "who"}
    run = standing_run(tmp_path)
    answers = {hook: getattr(Callback(), hook)(run, *given) for hook, given in HOOKS.items()}
    assert answers.pop("requests") == RankRequests(stop=False, save=False)
    assert set(answers.values()) == {None}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_user_s_come_between_ours_and_are_closed_in_the_other_order(
    hook: str, tmp_path: Path
) -> None:
    seen: list[tuple[Any, ...]] = []
    first, mine, other, last = (noting(name, seen) for name in ("first", "mine", "other", "last"))
    several = CallbackList([first], [mine, other], [last])
    given = HOOKS[hook]
    getattr(several, hook)(standing_run(tmp_path), *given)
    names = ["first", "mine", "other", "last"]
    assert seen == [(n, hook, *given) for n in (names[::-1] if hook == "close" else names)]


def test_what_one_wishes_is_wished_and_who_stops_is_told(tmp_path: Path) -> None:
    run = standing_run(tmp_path)
    quiet, saver, stopper = (
        noting(name, [], RankRequests(stop, save))
        for name, stop, save in (
            ("Quiet", False, False),
            ("Saver", False, True),
            ("Stopper", True, False),
        )
    )
    for ours, user, wished, who in (
        ([], [quiet], RankRequests(), "a signal"),
        ([saver], [quiet], RankRequests(save=True), "a signal"),
        ([saver], [quiet, stopper], RankRequests(True, True), "callback Stopper"),
        ([], [], RankRequests(), "a signal"),
    ):
        several = CallbackList(ours, user, [])
        assert several.requests(run) == wished
        assert several.stopper(run) == who


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "close"])
def test_an_error_of_the_user_s_is_a_line_with_the_place(hook: str, tmp_path: Path) -> None:
    run = standing_run(tmp_path, rank=1)
    for error in (ValueError("no\nsuch thing"), SystemExit("no\nsuch thing")):
        several = CallbackList([], [raising(hook, error)], [])
        with pytest.raises(CallbackError) as caught:
            getattr(several, hook)(run, *HOOKS[hook])
        kind = type(error).__name__
        place = f"(test_callbacks.py, line {raising.__code__.co_firstlineno + 2})"
        told = f"callback Broken, {hook} on rank 1: {kind}: no such thing {place}"
        assert str(caught.value) == told
        assert caught.value.exit_code == 1


def test_a_wish_that_is_none_is_told(tmp_path: Path) -> None:
    forgetful = noting("Forgetful", [], requests=None)
    with pytest.raises(
        CallbackError, match="callback Forgetful, requests on rank 0: AttributeError"
    ):
        CallbackList([], [forgetful], []).requests(standing_run(tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        DataError("the user's own line"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.distributed.DistNetworkError("a peer is lost"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ],
)
def test_what_the_job_has_words_for_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        CallbackList([], [raising("end", error)], []).end(standing_run(tmp_path))
    assert caught.value is error


def test_an_error_of_ours_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        CallbackList([raising("end", ZeroDivisionError())], [Callback()], []).end(
            standing_run(tmp_path)
        )


def test_all_are_closed_once_whatever_one_of_them_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[Any, ...]] = []
    broken = [raising("close", error) for error in (ValueError("no"), SystemExit(3))]
    several = CallbackList([noting("first", seen)], [*broken, noting("mine", seen)], [])
    run = standing_run(tmp_path)
    with caplog.at_level(logging.WARNING):
        several.close(run)
        several.close(run)
    assert seen == [("mine", "close"), ("first", "close")]
    lines = [record.getMessage() for record in caplog.records]
    assert ["callback Broken, close on rank 0" in line for line in lines] == [True, True]
    assert "SystemExit: 3" in lines[0]
    assert "ValueError: no" in lines[1]


def test_a_class_or_a_function_is_no_callback() -> None:
    check_callbacks([Callback(), noting("mine", [])])
    for wrong in (Callback, lambda run: None):
        with pytest.raises(ConfigError, match="expected an object of a class that derives from"):
            check_callbacks([wrong])  # type: ignore[list-item]


def test_a_request_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    standing_run(tmp_path).check_settled()
    with pytest.raises(CallbackError, match="too late: set it in before_step"):
        standing_run(tmp_path, settled=False).check_settled()


def test_the_old_names_of_requests_are_taken_for_one_release_more(tmp_path: Path) -> None:
    class Old(Callback):
        def wishes(self, run: Run) -> RankRequests:
            return RankRequests(stop=True)

    with pytest.warns(FutureWarning, match="Old.wishes: the hook is called requests"):
        assert CallbackList([], [Old()], []).requests(standing_run(tmp_path)).stop
    with pytest.warns(FutureWarning, match="Wishes is called RankRequests"):
        assert callbacks.Wishes is RankRequests
    with pytest.raises(AttributeError, match="has no attribute 'Wish'"):
        _ = callbacks.Wish
    with pytest.warns(FutureWarning, match="StepResult.wishes is called requests"):
        assert StepResult(0, 1.0, 1.0, 0.1, 8).wishes == RankRequests()
    with pytest.warns(FutureWarning, match="Piece is called TokenOutput"):
        assert generate.Piece is generate.TokenOutput
