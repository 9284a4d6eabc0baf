"""A pool of processes: results, errors that can and cannot be sent, and ends of processes."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from megapipe.errors import ConfigError
from megapipe.util.process_pool import ProcessPool, WorkerDied


class Odd(OSError):
    """An error that cannot be made from its arguments alone."""

    def __init__(self, *, word: str) -> None:
        super().__init__(word)


def does(job: str) -> Any:
    outcomes: dict[str, Callable[[], Any]] = {
        "config": lambda: raised(ConfigError("x=1: expected 2")),
        "other": lambda: raised(ZeroDivisionError("of a job")),
        "odd": lambda: raised(Odd(word="odd")),
        "function": lambda: lambda: 0,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    return outcomes[job]() if job in outcomes else job.upper()


def raised(error: Exception) -> None:
    raise error


def test_each_job_has_its_result() -> None:
    jobs = [f"job {n}" for n in range(7)]
    with ProcessPool[str, str](2, does) as pool:
        assert sorted(pool.run(jobs)) == [(job, job.upper()) for job in jobs]
        assert [*pool.run(["again"])] == [("again", "AGAIN")], "by the same processes"


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        ("config", ConfigError, "x=1: expected 2"),
        ("other", RuntimeError, "other: Traceback.*ZeroDivisionError: of a job"),
        ("odd", RuntimeError, "odd: Odd.*TypeError"),
        ("function", RuntimeError, "function: <function.*pickle"),
        ("killed", WorkerDied, "a process died; exit code -9"),
    ],
)
def test_errors(job: str, error: type[Exception], words: str) -> None:
    with ProcessPool[str, Any](1, does) as pool, pytest.raises(error, match=f"(?s){words}"):
        [*pool.run(["first", job])]
