"""Calls that may never come back, as those of clients of stores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from megapipe.util.lived import SLICE_S, LivedTime

T = TypeVar("T")


class NoAnswer(TimeoutError):
    """A call has not come back in time, or something does not answer as it should."""


def call_with_timeout(
    seconds: float,
    call: Callable[[], T],
    *,
    more: Callable[[], float] = lambda: 0.0,
    look: Callable[[], object] = lambda: None,
) -> T:
    """Return the result of a call in a thread of its own; raises what the call raises.

    Raises :class:`NoAnswer` after `seconds`, and those that `more` then gives, in which this
    process runs; `look` is called every half second meanwhile. The call is left behind, and ends
    with the process: threads of a pool would be waited for then.
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
    thread.join()  # else it may be what frees tensors that `call` leads to, while Python ends
    if error is not None:
        raise error
    return cast(T, result)
