"""Commands that a run of tests starts: none of them outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Condition = Callable[[], bool]
POLL_S = 0.1
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
"""How pytest spreads files over workers: in the order in which they are collected, each with its
worlds and fixtures on one worker. A worker that crashes ends the run: pytest-xdist 3.8 would put
its finished tests back, and wait for them for ever."""
PATIENCE_S = 30.0
"""Seconds that a command has to end its own processes when it is interrupted."""


def never() -> bool:
    """Return False, as the condition that does not come true."""
    return False


def run(module: str, *arguments: str, until: Condition = never) -> int:
    """Run `python -m MODULE ARGUMENTS` to its end, or until a condition holds; return its code."""
    with _started([sys.executable, "-m", module, *arguments]) as process:
        while process.poll() is None and not until():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    return process.returncode


@contextlib.contextmanager
def _started(
    command: Sequence[str], output: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; it is interrupted if the block ends before it does.

    It has a session of its own, so that the interrupt reaches it once, with all its processes.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _interrupt(process)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command and its processes as a terminal would, and kill what does not end."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Types:
    """mypy, beside the tests: one core's work for a minute."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Types]:
        """Start it; it is interrupted if the block ends before it does."""
        with (
            tempfile.NamedTemporaryFile(prefix="mypy-") as output,
            _started([sys.executable, "-m", "mypy"], output.fileno()) as process,
        ):
            yield cls(process, Path(output.name))

    def failed(self) -> bool:
        """Whether it has ended with errors."""
        return self._process.poll() not in (None, 0)

    def end(self) -> bool:
        """Wait for its end, print its output, and return whether types are right."""
        code = self._process.wait()
        print(self._output.read_text(), end="", flush=True)
        return code == 0
