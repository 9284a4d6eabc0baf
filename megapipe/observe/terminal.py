"""A terminal: lines that fit it, and beneath them a bar with the progress and the time left."""

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
"""Seconds that a bar stays at least, as steps may take less than a look at them."""


class Terminal:
    """Lines scroll above a bar, which is drawn anew after each of them: no thread, no cursor that
    stays hidden. Make one with :meth:`of`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._beneath: Any = None
        self._shown_at = -math.inf

    @classmethod
    def of(cls, stream: TextIO) -> Terminal | None:
        """The terminal that a stream writes to; None if it is one that cannot erase."""
        console = Console(file=stream, highlight=False, soft_wrap=False)
        return None if console.is_dumb_terminal else cls(console)

    @property
    def width(self) -> int:
        """Columns."""
        return self._console.width

    def print(self, when: str, text: str, style: str | None = None) -> None:
        """Print a line that begins with a dim time. A longer one goes on in the next."""
        self._erase()
        self._console.print(Text.assemble((when, "dim"), " ", (text, style or "")))
        self._draw()

    def show(self, done: int, total: int, text: str, *, at_once: bool = False) -> None:
        """Have the bar show how much is done, with `text` behind it, unless it was drawn just now
        and `at_once` does not ask for it."""
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
