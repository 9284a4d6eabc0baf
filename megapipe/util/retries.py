"""How requests to stores and web servers are repeated, and what is said while that lasts.

No request is waited for without an end, as no library promises to come back: one without an answer
is given up after half of a limit. A request that fails is repeated after 0.5, 1, 2, 4 and then
every 8 seconds, until the limit has passed since the first failure. One that is refused for good
(not there, not allowed) is not repeated. Libraries repeat requests in ways of their own; the limit
is one of time and not of tries, so that their waits and these do not multiply. After some
seconds a line says what is tried, and so does another one every minute.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from time import sleep
from typing import TypeVar

from megapipe.util import heartbeat
from megapipe.util.answers import call_with_timeout
from megapipe.util.lived import LivedTime
from megapipe.words import one_line, without_secrets

LIMIT_S = 200.0
"""Seconds from the first failure on in which a request is repeated, where no run says otherwise."""
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each repetition, at most; the last one counts for all that follow."""
TOLD_S, TOLD_EVERY_S = 7.0, 60.0
"""Seconds to the first line, and between later ones."""
LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ImportError, ValueError, TypeError, LookupError, AttributeError),
)
"""Errors that another try does not mend."""
PASSING = (408, 425, 429)
"""Answers of a web server, besides 500 and more, that may be others at another try."""
T = TypeVar("T")
_RANDOM = random.SystemRandom()  # Python's own generator belongs to the user's code
_says = True


def be_quiet() -> None:
    """Have this process say nothing of failures that may pass: another of its node does."""
    global _says
    _says = False


class Failed(Exception):
    """A request that failed, by `cause`, in a line; one that is not `lasting` may be repeated."""

    def __init__(self, doing: str, cause: Exception, tries: str = "") -> None:
        self.cause = _behind(cause)
        self.lasting = _is_lasting(self.cause)
        super().__init__(without_secrets(f"cannot {doing}: {_text(self.cause)}{tries}"))


class Operation:
    """Requests to a store that do one thing, `doing` in words, and are repeated for `limit_s`."""

    def __init__(self, doing: str, limit_s: float = LIMIT_S) -> None:
        self._doing = doing
        self._limit_s = limit_s
        self._failures = 0
        self._error = ""
        self._spent_s = 0.0
        """Seconds since the first request that failed began."""
        self._told_at_s = 0.0
        """At how many of these seconds a line was told last."""

    def request(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of one request. Raises :class:`Failed`, also where there is no answer
        within `seconds` (half of the limit)."""
        clock, limit_s = LivedTime(), seconds or self._limit_s / 2
        most_s = max(limit_s, self._limit_s)
        try:
            result = call_with_timeout(limit_s, work, look=lambda: self._tell(clock.look(), most_s))
        except Exception as error:
            self._spent_s += clock.look()
            tries = f" ({self._failures + 1} tries in {self._spent_s:.0f} s)" * (self._failures > 0)
            raise Failed(self._doing, error, tries) from error
        if self._failures:
            self._spent_s += clock.look()
        return result

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which makes requests, begun again where that may help.
        Raises :class:`Failed`."""
        for wait_s in _waits():
            try:
                result = work()
                break
            except Failed as failed:
                self._failures += 1
                self._error = _text(failed.cause)
                if failed.lasting or self._spent_s + wait_s >= self._limit_s:
                    raise
            self._tell(0.0, self._limit_s)
            sleep(_RANDOM.uniform(wait_s / 2, wait_s))  # many processes have failed at once
            self._spent_s += wait_s
        if self._told_at_s and self._failures:
            self._say(
                f"could {self._doing} after {self._spent_s:.0f} s, at try {self._failures + 1}"
            )
        return result

    def _tell(self, unanswered_s: float, limit_s: float) -> None:
        """Say, now and then, what is tried."""
        waited_s = self._spent_s + unanswered_s
        if waited_s < (self._told_at_s + TOLD_EVERY_S if self._told_at_s else TOLD_S):
            return
        self._told_at_s = waited_s
        tries = self._failures + (unanswered_s > 0)
        self._say(
            f"cannot {self._doing} yet: {self._error or 'no answer'} (tries: {tries} in "
            f"{waited_s:.0f} s; they end after {limit_s:.3g} s)"
        )

    def _say(self, line: str) -> None:
        if _says:
            heartbeat.print_notice(without_secrets(line))


def ask(doing: str, work: Callable[[], T], *, answer_s: float | None = None) -> T:
    """Return the result of a single request, repeated if need be. Raises :class:`Failed`, whose
    text is a line that says what could not be done, and why."""
    operation = Operation(doing)
    return operation.run(lambda: operation.request(work, answer_s))


def unless_absent(work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work`, or `otherwise` where a store answers that nothing is there."""
    try:
        return work()
    except FileNotFoundError as error:
        if not isinstance(_behind(error), FileNotFoundError):
            raise
        return otherwise


def _waits() -> Iterator[float]:
    yield from WAITS_S
    while True:
        yield WAITS_S[-1]


def _behind(error: Exception) -> Exception:
    """Return what made a library say that something is not there, if that was a failure."""
    cause = error.__cause__
    hides = isinstance(error, FileNotFoundError) and isinstance(cause, Exception)
    return cause if hides and not _is_lasting(cause) else error  # type: ignore[arg-type, return-value]


def is_answered_later(error: BaseException) -> bool:
    """Whether a server has answered, and may answer otherwise if it is asked again."""
    status = _status(error)
    return status is not None and (status >= 500 or status in PASSING)


def _is_lasting(error: Exception) -> bool:
    if _status(error) is not None:
        return not is_answered_later(error)
    if isinstance(error, json.JSONDecodeError):  # an answer that was cut short
        return False
    return isinstance(error, LASTING) or "Credential" in type(error).__name__


def _status(error: BaseException) -> int | None:
    """Return what the web server has answered, as the libraries of stores keep it."""
    behind = error.__cause__ if isinstance(error, OSError) else None  # an answer put in other words
    for each in (error, behind):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):  # botocore's
            found = [answer.get("ResponseMetadata", {}).get("HTTPStatusCode")]
        else:
            names = ("status", "status_code", "code")
            found = [getattr(holder, name, None) for holder in (each, answer) for name in names]
        for status in found:
            if isinstance(status, int) and status >= 400:
                return status
    return None


def _text(error: Exception) -> str:
    """Return the text of an error of a store, whose type tells what it lacks."""
    if isinstance(error, FileNotFoundError):
        return f"there is no such object or bucket ({one_line(error)})"
    if isinstance(error, PermissionError):
        return f"access is denied ({one_line(error)})"
    return one_line(error)
