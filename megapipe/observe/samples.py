"""``log.samples``: which samples each step took, and whether each was taken exactly once.

Every start of a run has a folder of its own in ``samples/``, ``003-after-120`` for the third one,
which went on after step 120; what earlier starts did after that step was lost, and does not count.
Each process that feeds a first stage writes a file, with one line for each step::

    {"step": 121, "samples": [[1920, "web", 1604, 7], [1921, "code", 315, 80]]}

that is the number of each sample in the run, its source ("" where there is but one), how many of
that source came before, over all epochs, and its number there. Samples that the run leaves out are
in a line of their own, ``{"left_out": [[1936, "web", 1617, 4]]}``. A run that goes back to a
checkpoint begins a folder as one that is started again. ``python -m megapipe.observe.samples
RUN_FOLDER`` checks them. Where a run was killed, the last steps may lack the line of a process:
they are unfinished, and the next start does them again.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megapipe.errors import ConfigError, DataError, MegapipeError
from megapipe.util.beneath import make_folder, open_no_symlinks
from megapipe.util.left_out import SkippedSamples
from megapipe.words import count_noun

FOLDER = "samples"
_START = re.compile(r"(\d+)-after-(\d+)")
_APART = 2
"""Steps at most that one process may be ahead of another when both are killed."""


class LoggedSample(NamedTuple):
    """A sample that a step took."""

    number: int
    """In the run."""
    source: str
    draw: int
    """Samples of the source before it, over all epochs."""
    sample: int
    """In its source."""


def new_start(run_folder: Path, after: int) -> Path:
    """Make the folder of a start of the run that goes on after step `after`. Raises OSError."""
    folder = make_folder(run_folder, FOLDER)
    number = max((start for start, _, _ in _starts(folder)), default=0) + 1
    path = folder / f"{number:03}-after-{after}"
    path.mkdir()
    return path


class SampleWriter:
    """Appends lines to a file of this process, each in one write."""

    def __init__(self, start: Path, rank: int) -> None:
        run_folder, name = start.parents[1], f"{FOLDER}/{start.name}/rank-{rank:05}.jsonl"
        self._file = open_no_symlinks(run_folder, name, "ab", buffering=0)

    def step(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Append the samples of a step, counted from 1. Raises OSError."""
        self._write({"step": step, "samples": samples})

    def left_out(self, samples: Sequence[LoggedSample]) -> None:
        """Append samples that no step takes. Raises OSError."""
        self._write({"left_out": samples})

    def _write(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode()
        if self._file.write(line + b"\n") != len(line) + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


class Logged(NamedTuple):
    """The logs of a run's starts."""

    steps: dict[int, list[LoggedSample]]
    """The samples of each step that counts, in their order."""
    unfinished: list[int]
    """The last steps, of which a process has no line, as after a kill."""
    left_out: dict[int, LoggedSample]
    """Samples that no step was to take, by their numbers."""


def read_samples(run_folder: Path) -> Logged:
    """The logs of a run. Raises :class:`DataError` for lines that cannot be read,
    :class:`ConfigError` where there are none."""
    steps: dict[int, list[LoggedSample]] = {}
    ends: list[int] = []
    left_out: dict[int, LoggedSample] = {}
    for _, after, folder in sorted(_starts(run_folder / FOLDER)):
        steps = {step: samples for step, samples in steps.items() if step <= after}
        ends, left_out = [], {}
        for path in sorted(folder.glob("rank-*.jsonl")):
            step = None
            for key, samples in _lines(path):
                if key is None:
                    left_out |= {taken.number: taken for taken in samples}
                else:
                    step = key
                    steps.setdefault(step, []).extend(samples)
            ends += [step] if step is not None else []  # later stages of the model are fed nothing
    if not steps:
        raise ConfigError(f"{run_folder}: no samples are logged: expected a run with log.samples")
    killed = ends and max(ends) - min(ends) <= _APART  # else a line is missing for another reason
    whole = min(ends) if killed else max(steps)
    return Logged(
        {step: sorted(steps[step]) for step in sorted(steps) if step <= whole},
        [step for step in sorted(steps) if step > whole],
        left_out,
    )


def check(logged: Logged) -> list[str]:
    """Lines of text about what was logged.

    Where a run has begun its data anew, they count from there on. Raises :class:`DataError` where a
    step is missing, or a sample of the run or of a source is missing, taken twice or out of its
    order; those that were to be left out are no gap.
    """
    steps, left_out = logged.steps, logged.left_out
    begin = next(number for number in itertools.count() if number not in left_out)
    numbers = list(steps)
    for before, step in itertools.pairwise(numbers):
        if step != before + 1:
            raise DataError(f"samples: step {before + 1} is missing")
    began, first, expected = numbers[0], 0, -1
    sources: dict[str, Counter[int]] = {}
    draws: dict[str, int] = {}
    passed: list[int] = []
    for step, samples in steps.items():
        if expected < 0 or (samples[0].number == begin and expected > begin):
            began, first, expected = step, samples[0].number, samples[0].number
            sources, draws, passed = {}, {}, []
        for taken in samples:
            while expected in left_out:
                gone = left_out[expected]
                draws[gone.source] = gone.draw + 1
                passed.append(expected)
                expected += 1
            if taken.number != expected:
                raise DataError(
                    f"samples: step {step} took sample {taken.number} where {expected} was next"
                )
            draw = draws.get(taken.source, taken.draw)
            if taken.draw != draw:
                raise DataError(
                    f"samples: step {step} took number {taken.draw} of source "
                    f"{taken.source or 'data.source'} where {draw} was next"
                )
            draws[taken.source] = draw + 1
            expected += 1
            sources.setdefault(taken.source, Counter())[taken.sample] += 1
    steps_taken, range_taken = f"{began} to {numbers[-1]}", f"{first} to {expected - 1}"
    lines = [f"steps {steps_taken} took samples {range_taken} of the run, each once and in order"]
    if passed:
        ranges = SkippedSamples.of((number, number + 1) for number in passed).ranges
        words = ", ".join(f"{a} to {b - 1}" for a, b in ranges)
        lines.append(f"left out: {count_noun(len(passed), 'sample')}, {words}")
    for name, found in sorted(sources.items()):
        low, high = min(found.values()), max(found.values())
        times = f"{low} times" if low == high else f"{low} to {high} times"
        lines.append(
            f"{name or 'source'}: {count_noun(found.total(), 'sample')}, {len(found):,} different "
            f"ones, each {'once' if high == 1 else times}"
        )
    for step in logged.unfinished:
        lines.append(
            f"step {step} is unfinished, as not all processes have logged it: it does not count, "
            "and the run's next start does it again"
        )
    return lines


def _starts(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Number of each start, the step after which it went on, and its folder."""
    for path in folder.glob("*-after-*"):
        if match := _START.fullmatch(path.name):
            yield int(match[1]), int(match[2]), path


def _lines(path: Path) -> Iterator[tuple[int | None, list[LoggedSample]]]:
    """The steps of a file, and None with what is left out; a last line that was cut short by a kill
    does not count."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            if "left_out" in record:
                yield None, [LoggedSample(*taken) for taken in record["left_out"]]
            else:
                yield record["step"], [LoggedSample(*taken) for taken in record["samples"]]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}:{number}: not a line of log.samples") from None


def main(argv: Sequence[str]) -> int:
    """Check the samples of the run folder that `argv` names; returns the exit code."""
    try:
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError("usage: python -m megapipe.observe.samples RUN_FOLDER")
        print("\n".join(check(read_samples(Path(argv[0])))))
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
