"""Console output: one aligned line per step, with the time; in a file or pipe with the date too.

A terminal shows as many values as fit in one line, by importance, and a progress bar at the bottom.
``log.jsonl`` has all values.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.text import is_terminal, plural

if TYPE_CHECKING:
    from megapipe.observe.terminal import Terminal

DATE, TIME = "%Y-%m-%d", "%H:%M:%S"


class ConsoleSink:
    """Prints the first, the last and every ``every``-th step, all validations and lines of text.

    On a terminal a progress bar shows every step. If the program that reads the output has ended (a
    closed pipe), further output is discarded.
    """

    name = "console"

    def __init__(
        self, stream: TextIO, every: int = 1, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._stream = stream
        self._every = every
        self._now = now
        self._first = True
        self._terminal = _terminal(stream)
        self._last: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        """Print the step if it is the first, the last, or a multiple of ``every``."""
        first, self._first = self._first, False
        if first or record.step % self._every == 0 or record.step == record.steps:
            if self._terminal is None:
                self._print(step_line(record))
            else:
                self._print(step_line(record, self._terminal.width - len(f"{self._now():{TIME}} ")))
        self._last = record
        if self._terminal is not None:
            left = f"{duration(record.eta_seconds)} left"
            self._terminal.show(record.step, record.steps, left)

    def phase(self, text: str) -> None:
        """Show, next to a terminal's progress bar, which phase of the run begins."""
        if self._terminal is not None and self._last is not None:
            self._terminal.show(self._last.step, self._last.steps, text, at_once=True)

    def validation(self, record: ValidationRecord) -> None:
        """Print a validation loss."""
        self._print(validation_line(record), "bold")

    def note(self, text: str) -> None:
        """Print a line of text."""
        self._print(text)

    def close(self) -> None:
        """Flush the stream; a failure to write must not change the exit code."""
        try:
            if self._terminal is not None:
                self._terminal.close()
            self._stream.flush()
        except (OSError, ValueError):
            self._discard()

    def _print(self, line: str, style: str | None = None) -> None:
        try:
            if self._terminal is None:
                print(f"{self._now():{DATE} {TIME}} {line}", file=self._stream, flush=True)
            else:
                self._terminal.print(f"{self._now():{TIME}}", line, style)
        except BrokenPipeError:
            self._discard()
            raise

    def _discard(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def _terminal(stream: TextIO) -> Terminal | None:
    """Return the terminal behind a stream; None for a file or pipe, or if it cannot erase lines."""
    if not is_terminal(stream):
        return None
    from megapipe.observe.terminal import Terminal  # loads rich

    return Terminal.of(stream)


def step_line(record: StepRecord, width: int | None = None) -> str:
    """Format one step in at most `width` columns (default: unlimited), without unknown values. A
    line that is too long drops its least important values, but never step number and loss."""
    cells = [*_cells(record)]
    for _, least in sorted(((rank, text) for rank, text in cells if rank), reverse=True):
        if width is None or len(" | ".join(text for _, text in cells)) <= width:
            break
        cells = [cell for cell in cells if cell[1] != least]
    return " | ".join(text for _, text in cells)


def _cells(record: StepRecord) -> Iterator[tuple[int, str]]:
    """Yield (rank, text) for each value of a line, from left to right. A line that is too long
    drops the texts with the highest rank first, and never those of rank 0."""
    yield 0, _position(record.step, record.steps)
    yield 6, f"{_compact(record.samples):>5} {plural('sample', record.samples):<7}"
    yield 0, f"loss {record.loss:7.4f}"
    yield 4, f"lr {record.lr:.2e}"
    yield 3, f"grad norm {record.grad_norm:8.3g}"
    yield 5, f"{record.seconds * 1e3:6,.0f} ms"
    yield 2, f"{_compact(record.tokens_per_second):>5} tok/s"
    if record.tflops_per_device is not None:
        yield 9, _flops(record.tflops_per_device * 1e12)
    if record.mfu is not None:
        yield 7, f"MFU {record.mfu:5.1%}"
    if record.memory_gib is not None:
        yield 8, f"{record.memory_gib:6.2f} GiB"
    if record.skipped_steps is not None:
        yield 1, f"{record.skipped_steps} skipped"
    if record.routing is not None:
        yield 7, f"aux loss {record.routing.aux_loss:.3f}"
        if record.routing.dropped_fraction:
            yield 7, f"{record.routing.dropped_fraction:.1%} dropped"
    if record.sources is not None:
        known = {name: s.loss for name, s in record.sources.items() if not math.isnan(s.loss)}
        for name, loss in known.items():
            yield 10, f"{name} {loss:.4f}"
    yield 1, f"ETA {duration(record.eta_seconds)}"


def validation_line(record: ValidationRecord) -> str:
    """Format a validation, aligned with the lines of steps."""
    position = _position(record.step, record.steps)
    what = "test" if record.split == "test" else "held-out"
    of = f" of {record.name}" if record.name else ""
    return f"{position} | loss {record.loss:7.4f} on {what} text{of} | {record.seconds:.1f} s"


def duration(seconds: float) -> str:
    """Format a time span as m:ss, h:mm:ss or days."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minutes}:{second:02}"


def _position(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def _flops(number: float) -> str:
    """Format FLOPs per second: a number of at most six characters, and a unit up to TFLOP/s."""
    scale, unit = next(
        (each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= each[0]), (1e3, "k")
    )
    return f"{number / scale:6.4g} {unit}FLOP/s"


def _compact(number: float) -> str:
    """Format a positive number in at most five characters: 850, 12.3k, 1.25M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"
