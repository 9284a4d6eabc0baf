"""Blocks that have a deadline, and the threads that count the time."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from megapipe.launch.deadline import call_unless_done


class End:
    """The end of a process, which is noted; it may hold tensors, as a traceback does."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def __call__(self) -> None:
        self.called.set()


@pytest.mark.parametrize("fails", [False, True])
def test_what_would_end_the_process_is_held_by_no_thread(fails: bool) -> None:
    """A thread that is the last to free a tensor aborts the process if Python ends by then."""
    end = End()
    called, seen = end.called, weakref.ref(end)
    before = threading.active_count()
    try:
        with call_unless_done(60, end):
            assert threading.active_count() == before + 1
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert threading.active_count() == before
    del end
    assert seen() is None
    assert not called.is_set()


def test_a_block_that_takes_too_long() -> None:
    end, began = End(), time.monotonic()
    with call_unless_done(0.1, end):
        assert end.called.wait(60)
    assert time.monotonic() - began >= 0.1
