"""Calls that come back, fail, or do neither."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from megapipe.util.timeouts import NoAnswer, call_with_timeout


def test_a_call_that_comes_back() -> None:
    assert call_with_timeout(5, lambda: "result") == "result"
    assert call_with_timeout(5, lambda: None) is None
    assert call_with_timeout(5, lambda: threading.current_thread().daemon)


@pytest.mark.parametrize("error", [ValueError("why"), TimeoutError("its own"), SystemExit(3)])
def test_a_call_that_fails(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_with_timeout(5, fail)
    assert caught.value is error


def test_a_call_that_does_neither() -> None:
    over, began = threading.Event(), time.monotonic()
    with pytest.raises(NoAnswer, match=r"^no answer in 0\.2 s$"):
        call_with_timeout(0.2, over.wait)
    assert time.monotonic() - began >= 0.2
    over.set()


class Call:
    """A call that may hold tensors."""

    def __call__(self) -> int:
        return 1


class LateThread(threading.Thread):
    """A thread that a busy machine does not let end at once."""

    def run(self) -> None:
        self._target()  # type: ignore[attr-defined]
        time.sleep(0.2)
        del self._target  # type: ignore[attr-defined]


def test_a_call_that_came_back_is_held_by_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is the last to free a tensor aborts the process if Python ends by then."""
    monkeypatch.setattr(threading, "Thread", LateThread)
    call = Call()
    seen = weakref.ref(call)
    assert call_with_timeout(5, call) == 1
    del call
    assert seen() is None
