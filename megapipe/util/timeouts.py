"""Time limits for calls that may never return, such as requests to object stores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from megapipe.util.lived import SLICE_S, LivedTime

T = TypeVar("T")


class NoAnswer(TimeoutError):
    """A call did not return within its time limit, or a peer has not answered as expected."""


def call_with_timeout(
    seconds: float,
    call: Callable[[], T],
    *,
    more: Callable[[], float] = lambda: 0.0,
    look: Callable[[], object] = lambda: None,
) -> T:
    """Return the result of `call`, made in a new thread; raise what `call` raises.

    Raises :class:`NoAnswer` after the time limit: `seconds` plus the present result of `more()`.
    Time in which this process is suspended does not count. Meanwhile `look` is called every half
    second. After the limit the thread is abandoned and ends with the process; threads of a pool
    would keep the process from exiting.
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    clock, waited = LivedTime(), 0.0
    while True:
        left = seconds + more() - waited
        try:
            result, error = answer.get(timeout=min(max(left, 0.0), SLICE_S))
            break
        except queue.Empty:
            waited, limit = clock.look(), seconds + more()
            if waited >= limit:
                raise NoAnswer(f"no answer in {limit:.3g} s") from None
            look()
    thread.join()  # else the thread may free tensors of `call` while Python exits
    if error is not None:
        raise error
    return cast(T, result)
