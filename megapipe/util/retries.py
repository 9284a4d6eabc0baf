"""Retries of requests to object stores and web servers, with a line on stderr if they take long.

No library promises that a request returns, so a request is given up after half of a time limit. A
failed request is retried after up to 0.5, 1, 2, 4 and then 8 seconds each, until the limit has
passed since the first failure. A request that is refused for good (not found, not allowed) is not
retried. The limit is a time and not a number of tries: otherwise the number would be multiplied by
the retries inside the libraries. After some seconds a line on stderr says what is being tried;
another line follows every minute.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from time import sleep
from typing import TypeVar

from megapipe.text import one_line, without_secrets
from megapipe.util import heartbeat
from megapipe.util.lived import LivedTime
from megapipe.util.timeouts import call_with_timeout

LIMIT_S = 200.0
"""Default number of seconds for which a request is retried after its first failure."""
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Maximum wait before the first, second, ... retry, seconds; the last value is for all others."""
FIRST_LINE_S, LINE_EVERY_S = 7.0, 60.0
"""Seconds until the first line about a failing request is printed, and between later lines."""
LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ImportError, ValueError, TypeError, LookupError, AttributeError),
)
"""Types of errors that a retry does not fix."""
PASSING = (408, 425, 429)
"""HTTP status codes below 500 after which a request is retried; from 500 on it always is."""
T = TypeVar("T")
_RANDOM = random.SystemRandom()  # Python's own generator belongs to user code
_is_verbose = True


def be_quiet() -> None:
    """Print no lines about retries in this process; another process of the node prints them."""
    global _is_verbose
    _is_verbose = False


class Failed(Exception):
    """One-line error of a failed request. Its `cause` is the library's exception, and `lasting`
    says that a retry would fail too."""

    def __init__(self, doing: str, cause: Exception, tries: str = "") -> None:
        self.cause = _behind(cause)
        self.lasting = _is_lasting(self.cause)
        super().__init__(without_secrets(f"cannot {doing}: {_text(self.cause)}{tries}"))


class Operation:
    """One or several requests for one purpose, which are retried for `limit_s` seconds. `doing`
    names the purpose in messages: a verb and its object."""

    def __init__(self, doing: str, limit_s: float = LIMIT_S) -> None:
        self._doing = doing
        self._limit_s = limit_s
        self._failures = 0
        self._error = ""
        self._spent_s = 0.0
        """Seconds since the first failed request began; 0 if none has failed."""
        self._line_at_s = 0.0
        """Value of `_spent_s` when the newest line was printed; 0 if none was printed."""

    def request(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Make one request by calling `work`, and return its result. Raises :class:`Failed` if the
        request fails, or does not return within `seconds` (default: half of the limit)."""
        clock, limit_s = LivedTime(), seconds or self._limit_s / 2
        most_s = max(limit_s, self._limit_s)
        try:
            result = call_with_timeout(
                limit_s, work, look=lambda: self._report(clock.look(), most_s)
            )
        except Exception as error:
            self._spent_s += clock.look()
            tries = f" ({self._failures + 1} tries in {self._spent_s:.0f} s)" * (self._failures > 0)
            raise Failed(self._doing, error, tries) from error
        if self._failures:
            self._spent_s += clock.look()
        return result

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, which makes requests with :meth:`request`, and return its result. If one of
        them fails and a retry may help, call `work` again. Raises :class:`Failed`."""
        for wait_s in _waits():
            try:
                result = work()
                break
            except Failed as failed:
                self._failures += 1
                self._error = _text(failed.cause)
                if failed.lasting or self._spent_s + wait_s >= self._limit_s:
                    raise
            self._report(0.0, self._limit_s)
            sleep(_RANDOM.uniform(wait_s / 2, wait_s))  # many processes have failed at once
            self._spent_s += wait_s
        if self._line_at_s and self._failures:
            self._print(
                f"could {self._doing} after {self._spent_s:.0f} s, at try {self._failures + 1}"
            )
        return result

    def _report(self, unanswered_s: float, limit_s: float) -> None:
        """Print that the operation is still being tried, unless such a line was printed recently.
        `unanswered_s`: seconds since the present request began, 0 between requests. `limit_s`: the
        time limit that the line shows."""
        waited_s = self._spent_s + unanswered_s
        if waited_s < (self._line_at_s + LINE_EVERY_S if self._line_at_s else FIRST_LINE_S):
            return
        self._line_at_s = waited_s
        tries = self._failures + (unanswered_s > 0)
        self._print(
            f"cannot {self._doing} yet: {self._error or 'no answer'} (tries: {tries} in "
            f"{waited_s:.0f} s; they end after {limit_s:.3g} s)"
        )

    def _print(self, line: str) -> None:
        if _is_verbose:
            heartbeat.print_notice(without_secrets(line))


def ask(doing: str, work: Callable[[], T], *, answer_s: float | None = None) -> T:
    """Make a single request by calling `work`, retry it if that may help, and return its result.

    `doing` names the purpose in messages: a verb and its object. `answer_s`: the time limit of each
    try, seconds (default: half of :data:`LIMIT_S`). Raises :class:`Failed`, whose text says in one
    line what failed and why.
    """
    operation = Operation(doing)
    return operation.run(lambda: operation.request(work, answer_s))


def unless_absent(work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work`, or `otherwise` if the store answers that there is no object."""
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
    """Return the exception that a library has turned into the FileNotFoundError `error`, if a retry
    may fix the former; else return `error`."""
    cause = error.__cause__
    hides = isinstance(error, FileNotFoundError) and isinstance(cause, Exception)
    return cause if hides and not _is_lasting(cause) else error  # type: ignore[arg-type, return-value]


def is_answered_later(error: BaseException) -> bool:
    """Whether `error` has an HTTP status after which a retry may succeed, such as 503."""
    status = _status(error)
    return status is not None and (status >= 500 or status in PASSING)


def _is_lasting(error: Exception) -> bool:
    if _status(error) is not None:
        return not is_answered_later(error)
    if isinstance(error, json.JSONDecodeError):  # an answer that was cut short
        return False
    return isinstance(error, LASTING) or "Credential" in type(error).__name__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status code in an error, which libraries name differently; None if none."""
    behind = error.__cause__ if isinstance(error, OSError) else None  # what a library translated
    for each in (error, behind):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):  # of botocore
            found = [answer.get("ResponseMetadata", {}).get("HTTPStatusCode")]
        else:
            names = ("status", "status_code", "code")
            found = [getattr(holder, name, None) for holder in (each, answer) for name in names]
        for status in found:
            if isinstance(status, int) and status >= 400:
                return status
    return None


def _text(error: Exception) -> str:
    """Return the text of a store's error, with an explanation for some types."""
    if isinstance(error, FileNotFoundError):
        return f"there is no such object or bucket ({one_line(error)})"
    if isinstance(error, PermissionError):
        return f"access is denied ({one_line(error)})"
    return one_line(error)
