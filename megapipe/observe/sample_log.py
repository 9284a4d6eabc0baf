"""``log.sample_ids``: which samples each step took, and a check that each was taken exactly once.

Every start of a run has a folder in ``samples/``: ``003-after-120`` is the folder of the third
start, which resumed after step 120. Later steps of earlier starts were lost, and do not count. Each
process that feeds a first stage writes a file, with one line for each step::

    {"step": 121, "samples": [[1920, "web", 1604, 7], [1921, "code", 315, 80]]}

A sample is [its index in the run, its source ("" with a single source), the number of earlier
samples of that source over all epochs, its index in the source]. Skipped samples have a separate
line, ``{"skipped_samples": [[1936, "web", 1617, 4]]}``. A rewind begins a new folder, as a restart
does. ``python -m megapipe.observe.sample_log RUN_FOLDER`` checks all samples. After a kill, the
last steps can lack the line of some process. These steps are unfinished, and the next start repeats
them.
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
from megapipe.text import count_noun
from megapipe.util.no_symlinks import make_folder, open_no_symlinks
from megapipe.util.skipped_samples import SkippedSamples

FOLDER = "samples"
_OLD = "left_out"
"""Key of skipped samples in logs of version 0.1."""
_START = re.compile(r"(\d+)-after-(\d+)")
_APART = 2
"""Maximum number of steps by which one process may be ahead of another when both are killed."""


class LoggedSample(NamedTuple):
    """One sample that a step took."""

    number: int
    """Index of the sample in the run."""
    source: str
    draw: int
    """Number of earlier samples of the same source, over all epochs."""
    sample: int
    """Index of the sample in its source."""


def new_start(run_folder: Path, after: int) -> Path:
    """Make the log folder of a start that resumes after step `after`. Raises OSError."""
    folder = make_folder(run_folder, FOLDER)
    number = max((start for start, _, _ in _starts(folder)), default=0) + 1
    path = folder / f"{number:03}-after-{after}"
    path.mkdir()
    return path


class SampleWriter:
    """Appends lines to this process's log file, each line with one write."""

    def __init__(self, start: Path, rank: int) -> None:
        run_folder, name = start.parents[1], f"{FOLDER}/{start.name}/rank-{rank:05}.jsonl"
        self._file = open_no_symlinks(run_folder, name, "ab", buffering=0)

    def step(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Append the samples of a step, counted from 1. Raises OSError."""
        self._write({"step": step, "samples": samples})

    def skipped_samples(self, samples: Sequence[LoggedSample]) -> None:
        """Append skipped samples. Raises OSError."""
        self._write({"skipped_samples": samples})

    def _write(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode()
        if self._file.write(line + b"\n") != len(line) + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


class Logged(NamedTuple):
    """The logs of a run's starts, combined."""

    steps: dict[int, list[LoggedSample]]
    """Samples of each step, in order. Steps that a later start has repeated count once."""
    unfinished: list[int]
    """Final steps for which a process wrote no line, because it was killed."""
    skipped_samples: dict[int, LoggedSample]
    """Skipped samples, by index in the run."""


def read_samples(run_folder: Path) -> Logged:
    """Read the sample logs of a run. Raises :class:`DataError` for lines that cannot be read,
    :class:`ConfigError` if there are no logs."""
    steps: dict[int, list[LoggedSample]] = {}
    ends: list[int] = []
    skipped_samples: dict[int, LoggedSample] = {}
    for _, after, folder in sorted(_starts(run_folder / FOLDER)):
        steps = {step: samples for step, samples in steps.items() if step <= after}
        ends, skipped_samples = [], {}
        for path in sorted(folder.glob("rank-*.jsonl")):
            step = None
            for key, samples in _lines(path):
                if key is None:
                    skipped_samples |= {taken.number: taken for taken in samples}
                else:
                    step = key
                    steps.setdefault(step, []).extend(samples)
            ends += [step] if step is not None else []  # later stages log nothing
    if not steps:
        raise ConfigError(f"{run_folder} has no sample log: expected a run with log.sample_ids")
    killed = ends and max(ends) - min(ends) <= _APART  # else the cause is not a kill
    whole = min(ends) if killed else max(steps)
    return Logged(
        {step: sorted(steps[step]) for step in sorted(steps) if step <= whole},
        [step for step in sorted(steps) if step > whole],
        skipped_samples,
    )


def check(logged: Logged) -> list[str]:
    """Check that no sample is missing or repeated; return lines of text about the logs.

    If the run has restarted its data from the beginning, only steps since the newest such restart
    are checked. Raises :class:`DataError` if a step is missing, or if a sample of the run or of a
    source is missing, taken twice or out of order. Skipped samples do not count as missing.
    """
    steps, skipped_samples = logged.steps, logged.skipped_samples
    begin = next(number for number in itertools.count() if number not in skipped_samples)
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
            while expected in skipped_samples:
                gone = skipped_samples[expected]
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
        lines.append(f"skipped: {count_noun(len(passed), 'sample')}, {words}")
    for name, found in sorted(sources.items()):
        low, high = min(found.values()), max(found.values())
        times = f"{low} times" if low == high else f"{low} to {high} times"
        lines.append(
            f"{name or 'source'}: {count_noun(found.total(), 'sample')}, {len(found):,} different "
            f"ones, each {'once' if high == 1 else times}"
        )
    for step in logged.unfinished:
        lines.append(
            f"step {step} is unfinished, because not all processes have logged it: it does "
            "not count, and the run's next start repeats it"
        )
    return lines


def _starts(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield the number of each start, the step after which it resumed, and its folder."""
    for path in folder.glob("*-after-*"):
        if match := _START.fullmatch(path.name):
            yield int(match[1]), int(match[2]), path


def _lines(path: Path) -> Iterator[tuple[int | None, list[LoggedSample]]]:
    """Yield (step, samples) for each line of a file; step is None for skipped samples. A final line
    that was cut off by a kill is ignored."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            skipped = record.get("skipped_samples", record.get(_OLD))
            if skipped is not None:
                yield None, [LoggedSample(*taken) for taken in skipped]
            else:
                yield record["step"], [LoggedSample(*taken) for taken in record["samples"]]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}:{number}: not a line of log.sample_ids") from None


def main(argv: Sequence[str]) -> int:
    """Check the samples of the run folder that `argv` names; returns the exit code."""
    try:
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError("usage: python -m megapipe.observe.sample_log RUN_FOLDER")
        print("\n".join(check(read_samples(Path(argv[0])))))
    except MegapipeError as error:
        print(f"megapipe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
