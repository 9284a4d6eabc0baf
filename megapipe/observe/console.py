"""One aligned line per step on the terminal, with its date, plain text wherever it goes."""

import contextlib
import math
import os
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.words import plural


class ConsoleSink:
    """Prints every ``every``-th step, the first and the last, validations and notes.

    A reader that has gone away (a closed pipe) is replaced by the null device.
    """

    name = "console"

    def __init__(
        self, stream: TextIO, every: int = 1, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._stream = stream
        self._every = every
        self._now = now
        self._first = True

    def step(self, record: StepRecord) -> None:
        """Print the step if it is one to be shown."""
        first, self._first = self._first, False
        if first or record.step % self._every == 0 or record.step == record.steps:
            self._print(step_line(record))

    def validation(self, record: ValidationRecord) -> None:
        """Print a validation loss."""
        self._print(validation_line(record))

    def note(self, text: str) -> None:
        """Print a line of text."""
        self._print(text)

    def close(self) -> None:
        """Flush; output that cannot be delivered must not change the exit code."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._discard()

    def _print(self, line: str) -> None:
        try:
            print(f"{self._now():%Y-%m-%d %H:%M:%S} {line}", file=self._stream, flush=True)
        except BrokenPipeError:
            self._discard()
            raise

    def _discard(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def step_line(record: StepRecord) -> str:
    """One step; a value that is not known is left out."""
    cells = [
        _position(record.step, record.steps),
        f"{_compact(record.samples):>5} {plural('sample', record.samples):<7}",
        f"loss {record.loss:7.4f}",
        f"lr {record.lr:.2e}",
        f"grad norm {record.grad_norm:8.3g}",
        f"{record.seconds * 1e3:6,.0f} ms",
        f"{_compact(record.tokens_per_second):>5} tok/s",
    ]
    if record.tflops_per_device is not None:
        cells.append(_flops(record.tflops_per_device * 1e12))
    if record.mfu is not None:
        cells.append(f"MFU {record.mfu:5.1%}")
    if record.memory_gib is not None:
        cells.append(f"{record.memory_gib:6.2f} GiB")
    if record.skipped is not None:
        cells.append(f"{record.skipped} skipped")
    if record.routing is not None:
        cells.append(f"balance {record.routing.balance:.3f}")
        if record.routing.dropped:
            cells.append(f"{record.routing.dropped:.1%} dropped")
    if record.sources is not None:
        known = {name: s.loss for name, s in record.sources.items() if not math.isnan(s.loss)}
        cells += [f"{name} {loss:.4f}" for name, loss in known.items()]
    cells.append(f"ETA {duration(record.eta_seconds)}")
    return " | ".join(cells)


def validation_line(record: ValidationRecord) -> str:
    """A validation, aligned with the steps around it."""
    position = _position(record.step, record.steps)
    what = "test" if record.split == "test" else "held-out"
    of = f" of {record.name}" if record.name else ""
    return f"{position} | loss {record.loss:7.4f} on {what} text{of} | {record.seconds:.1f} s"


def duration(seconds: float) -> str:
    """A time span as m:ss, h:mm:ss or days."""
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
    """FLOPs per second, in the unit that leaves a number of at most six characters."""
    scale, unit = next(
        (each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= each[0]), (1e3, "k")
    )
    return f"{number / scale:6.4g} {unit}FLOP/s"


def _compact(number: float) -> str:
    """A positive number in at most five characters: 850, 12.3k, 1.25M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"
