"""How far a preparation is: a bar on a terminal, a line now and then elsewhere."""

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
"""Seconds to the first line where there is no terminal, and between later ones."""


class Meter(Protocol):
    """Is told what has been done."""

    def advance(self, nbytes: int, documents: int = 0, *, at_once: bool = False) -> None:
        """So many more bytes have been read, and documents found in them; `at_once`: they were
        there already, and say nothing of the pace."""


@contextmanager
def meter(doing: str, total: int | None, *, wanted: bool = True) -> Iterator[Meter]:
    """Shows progress on stderr.

    Args:
        doing: what is done, for the user.
        total: bytes to read; None where that is not known.
        wanted: False: show nothing.
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
        lines.tell_found()


class _Nothing:
    def advance(self, nbytes: int, documents: int = 0, *, at_once: bool = False) -> None:
        pass


class _Bar:
    def __init__(self, bar: Progress, doing: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(doing, total=total or None, documents=0)
        self._documents = 0

    def advance(self, nbytes: int, documents: int = 0, *, at_once: bool = False) -> None:
        self._documents += documents
        self._bar.update(self._task, advance=nbytes, documents=self._documents)


class _Lines:
    def __init__(self, doing: str, total: int | None) -> None:
        self._doing = doing
        self._total = total
        self._began = time.monotonic()
        self._next = self._began + FIRST_LINE_S
        self._done = self._at_once = 0
        self._documents = 0
        self._told_found = False

    def advance(self, nbytes: int, documents: int = 0, *, at_once: bool = False) -> None:
        if not at_once:
            self.tell_found()
        self._done += nbytes
        self._at_once += nbytes if at_once else 0
        self._documents += documents
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._tell(self._line(now - self._began))

    def tell_found(self) -> None:
        """Say, once, what was there before anything else was done."""
        if self._at_once and not self._told_found:
            self._tell(f"{self._so_far()} were there already")
        self._told_found = True

    def _tell(self, line: str) -> None:
        print(f"megapipe: {line}", file=sys.stderr, flush=True)

    def _so_far(self) -> str:
        so_far = f"{self._doing}: {self._documents:,} documents, {self._done / 1e6:,.0f} MB"
        return f"{so_far} of {self._total / 1e6:,.0f}" if self._total else so_far

    def _line(self, seconds: float) -> str:
        pace = (self._done - self._at_once) / seconds
        line = self._so_far()
        if self._total:
            left = (self._total - self._done) / pace if pace else float("inf")
            line += f", {left / 60:,.0f} min left"
        return f"{line}, {pace / 1e6:,.1f} MB/s"


class _Pace(ProgressColumn):
    """Megabytes a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{(task.finished_speed or task.speed or 0) / 1e6:,.1f} MB/s")


def _bar(console: Console, total: int | None) -> Progress:
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[documents]:,} documents"),
    ]
    columns += [BarColumn(), TimeRemainingColumn()] if total else [TimeElapsedColumn()]
    return Progress(*columns, _Pace(), console=console, transient=True)
