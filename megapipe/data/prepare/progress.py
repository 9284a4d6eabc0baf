"""Progress of a preparation: a bar on a terminal, otherwise a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

FIRST_LINE_S = 10.0
LINE_EVERY_S = 60.0
"""Seconds before the first line, and between lines, if there is no terminal."""


class Meter(Protocol):
    """Receives the amount of work done."""

    def advance(self, nbytes: int, documents: int = 0, *, done_before: bool = False) -> None:
        """Add `nbytes` bytes that were read, and `documents` documents. `done_before`: an earlier
        start has done this work, so it does not count for the speed."""


@contextmanager
def meter(doing: str, total: int | None, *, wanted: bool = True) -> Iterator[Meter]:
    """Show progress on stderr.

    Args:
        doing: name of the work, for the user.
        total: number of bytes to read; None if unknown.
        wanted: whether to show anything.
    """
    console = Console(stderr=True)
    if not wanted:
        yield _Nothing()
    elif console.is_terminal:
        with _bar(console, total) as bar:
            yield _Bar(bar, doing, total)
    else:
        lines = _Lines(doing, total)
        yield lines
        lines.report_found()


class _Nothing:
    def advance(self, nbytes: int, documents: int = 0, *, done_before: bool = False) -> None:
        pass


class _Bar:
    def __init__(self, bar: Progress, doing: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(doing, total=total or None, documents=0)
        self._documents = 0

    def advance(self, nbytes: int, documents: int = 0, *, done_before: bool = False) -> None:
        self._documents += documents
        self._bar.update(self._task, advance=nbytes, documents=self._documents)


class _Lines:
    def __init__(self, doing: str, total: int | None) -> None:
        self._doing = doing
        self._total = total
        self._began = time.monotonic()
        self._next = self._began + FIRST_LINE_S
        self._done = self._done_before = 0
        self._documents = 0
        self._reported_found = False

    def advance(self, nbytes: int, documents: int = 0, *, done_before: bool = False) -> None:
        if not done_before:
            self.report_found()
        self._done += nbytes
        self._done_before += nbytes if done_before else 0
        self._documents += documents
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._print(self._line(now - self._began))

    def report_found(self) -> None:
        """Print how much an earlier start had finished; a second call prints nothing."""
        if self._done_before and not self._reported_found:
            self._print(f"{self._so_far()} were already tokenized")
        self._reported_found = True

    def _print(self, line: str) -> None:
        print(f"megapipe: {line}", file=sys.stderr, flush=True)

    def _so_far(self) -> str:
        so_far = f"{self._doing}: {self._documents:,} documents, {self._done / 1e6:,.0f} MB"
        return f"{so_far} of {self._total / 1e6:,.0f}" if self._total else so_far

    def _line(self, seconds: float) -> str:
        pace = (self._done - self._done_before) / seconds
        line = self._so_far()
        if self._total:
            left = (self._total - self._done) / pace if pace else float("inf")
            line += f", {left / 60:,.0f} min left"
        return f"{line}, {pace / 1e6:,.1f} MB/s"


class _Pace(ProgressColumn):
    """Column of the progress bar with the speed in megabytes per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{(task.finished_speed or task.speed or 0) / 1e6:,.1f} MB/s")


def _bar(console: Console, total: int | None) -> Progress:
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[documents]:,} documents"),
    ]
    columns += [BarColumn(), TimeRemainingColumn()] if total else [TimeElapsedColumn()]
    return Progress(*columns, _Pace(), console=console, transient=True)
