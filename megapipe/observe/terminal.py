"""A terminal: lines that fit its width, and below them a bar with progress and time left."""

from __future__ import annotations

import math
import time
from typing import Any, TextIO

from rich.console import Console
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

LONGEST_BAR = 60
REDRAWN_S = 0.1
"""Minimum number of seconds between two redraws of the bar."""


class Terminal:
    """Prints lines above a progress bar, and redraws the bar after each line, without a thread and
    without hiding the cursor. Make one with :meth:`of`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._beneath: Any = None
        self._shown_at = -math.inf

    @classmethod
    def of(cls, stream: TextIO) -> Terminal | None:
        """Return the terminal that a stream writes to; None if it cannot erase lines."""
        console = Console(file=stream, highlight=False, soft_wrap=False)
        return None if console.is_dumb_terminal else cls(console)

    @property
    def width(self) -> int:
        """Width in columns."""
        return self._console.width

    def print(self, when: str, text: str, style: str | None = None) -> None:
        """Print a line that begins with a dim time stamp; a line that is too long is wrapped."""
        self._erase()
        self._console.print(Text.assemble((when, "dim"), " ", (text, style or "")))
        self._draw()

    def show(self, done: int, total: int, text: str, *, at_once: bool = False) -> None:
        """Draw the bar at `done` of `total` steps, followed by `text`. A bar drawn less than
        :data:`REDRAWN_S` ago stays, unless `at_once`."""
        if not at_once and time.monotonic() - self._shown_at < REDRAWN_S:
            return
        self._shown_at = time.monotonic()
        row = Table.grid(padding=(0, 1))
        row.add_column(justify="right")
        row.add_column(width=max(8, min(LONGEST_BAR, self.width - len(text) - 8)))
        row.add_column(no_wrap=True, overflow="crop")
        bar = ProgressBar(total=total, completed=done)
        row.add_row(f"{done / total:4.0%}", bar, Text(text, "cyan"))
        self._erase()
        self._beneath = row
        self._draw()

    def close(self) -> None:
        """Remove the bar."""
        self._erase()
        self._beneath = None

    def _erase(self) -> None:
        if self._beneath is not None:
            self._console.control(Control(ControlType.CARRIAGE_RETURN))
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2)))

    def _draw(self) -> None:
        if self._beneath is not None:
            with self._console.capture() as captured:
                self._console.print(self._beneath)
            self._console.file.write(captured.get().rstrip("\n"))
        self._console.file.flush()
