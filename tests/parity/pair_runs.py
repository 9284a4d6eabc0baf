"""Cases of a matrix, run and compared with their reference.

``python -m tests.parity.pair_runs find parity`` updates the file of cases to the dimensions of
:mod:`tests.parity.matrix` (``stale``: :mod:`tests.parity.async_matrix`). Cases that are still legal
stay, and missing ones are searched. If a rule has been relaxed, ``--again`` retries pairs that no
case could have. ``measure`` runs every case without a time (with ``--again`` all) and notes its
seconds, which a run's draw uses.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megapipe.testing import World, run_world
from tests.parity import async_matrix, matrix
from tests.parity.async_ranks import run_stale
from tests.parity.async_windows import check_windows
from tests.parity.case_file import PairCase, path_of, read, write
from tests.parity.cases import Case
from tests.parity.checking import check_case
from tests.parity.pairs import Choice, Pair, Pairs
from tests.parity.ranks import run_case
from tests.parity.traced_compiler import traced_blocks

TOGETHER = 12
"""Cases per world while they are measured: one that fails makes the others of its world fail."""


@dataclass(frozen=True)
class Matrix:
    """Dimensions, and how their cases are tested."""

    pairs: Pairs
    to_case: Callable[[Choice], Case]
    run: Callable[..., Any]
    """Runs a case on a rank of a world, and returns the outcome."""
    check: Callable[..., None]
    """Compares the outcomes of all ranks with the reference."""
    test: str
    """File of the test."""


MATRICES = {
    "parity": Matrix(
        matrix.MATRIX, matrix.to_case, run_case, check_case, "tests/dist/test_parity.py"
    ),
    "stale": Matrix(
        *(async_matrix.MATRIX, async_matrix.to_case, run_stale, check_windows),
        "tests/dist/test_async_pairs.py",
    ),
}


def choice_of(name: str, case: PairCase) -> Choice:
    """Return the value of each dimension. KeyError: a dimension or a value no longer exists."""
    pairs = MATRICES[name].pairs
    return pairs.plain | _values(pairs, case.values)


def case_of(name: str, case: PairCase) -> Case:
    return MATRICES[name].to_case(choice_of(name, case))


def _values(pairs: Pairs, given: Any) -> Choice:
    """Return values of dimensions as they were before they were written."""
    of = {name: {json.dumps(value): value for value in pairs.dimensions[name]} for name in given}
    return {name: of[name][json.dumps(value)] for name, value in given.items()}


def impossible_pairs(name: str) -> list[Pair]:
    """Return the pairs that no case can have, as the file says, if their values still exist."""
    pairs, found = MATRICES[name].pairs, []
    for each in read(name)[1]:
        try:
            values = _values(pairs, each)
        except KeyError:
            continue
        first, second = (each for each in values.items())
        found.append((first, second))
    return found


def run_timed(world: World, run: Callable[..., Any], cases: Sequence[Case]) -> list[Any]:
    """Return outcome and seconds of each case; compiled blocks are traced, but without inductor."""
    outcomes = []
    for case in cases:
        began = time.monotonic()
        with traced_blocks() if case.compile else nullcontext():
            try:
                outcomes.append((run(world, case), time.monotonic() - began))
            except Exception as error:
                error.add_note(f"case: {case.name}")
                raise
    return outcomes


def run_cases(cases: Sequence[Case], name: str) -> tuple[list[float], dict[int, str]]:
    """Run cases with equally many ranks and compare each with the reference. Return their seconds
    and, by index, the errors of those that differ."""
    of = MATRICES[name]
    (ranks,) = {case.world for case in cases}
    limit_s = 60 + 20 * len(cases)
    results = run_world(ranks, run_timed, of.run, list(cases), timeout_s=limit_s)
    seconds, wrong = [], {}
    for place, (case, found) in enumerate(zip(cases, zip(*results, strict=True), strict=True)):
        began = time.monotonic()
        try:
            of.check(case, [outcome for outcome, _ in found])
        except AssertionError as error:
            wrong[place] = f"{case.name}: {error}"
        seconds.append(max(taken for _, taken in found) + time.monotonic() - began)
    return seconds, wrong


def check_cases(cases: Sequence[Case]) -> None:
    """Compare cases with the reference, as in the parity matrix."""
    assert cases
    wrong: list[str] = []
    for world in sorted({case.world for case in cases}):
        wrong += run_cases([case for case in cases if case.world == world], "parity")[1].values()
    assert not wrong, "\n".join(wrong)


def check_pairs(name: str, cases: Sequence[PairCase]) -> list[float]:
    """Compare cases with equally many ranks with the reference; return their seconds. An error has
    the command that repeats it."""
    try:
        seconds, wrong = run_cases([case_of(name, case) for case in cases], name)
    except AssertionError as error:  # of a rank
        raise AssertionError(f"{error}\n{_to_repeat(name, cases)}") from None
    texts = [f"{text}\n{_to_repeat(name, [cases[place]])}" for place, text in wrong.items()]
    assert not texts, "\n".join(texts)
    return seconds


def _to_repeat(name: str, cases: Sequence[PairCase]) -> str:
    ids = ",".join(case.id for case in cases)
    return f"to repeat it: python -m pytest {MATRICES[name].test} -m full -k drawn --case {ids}"


def find(name: str, again: bool) -> None:
    """Update the file of a matrix to its dimensions. `again`: retry each pair that no case could
    have."""
    pairs, begin = MATRICES[name].pairs, []
    old, _ = read(name)
    for case in old:
        try:
            begin.append(choice_of(name, case))
        except KeyError:
            continue

    def told(choices: int, missing: int) -> None:
        print(f"\r{choices} cases, {missing} pairs are missing ", end="", file=sys.stderr)

    known = [] if again else impossible_pairs(name)
    choices, impossible = pairs.covering(random.Random(0), begin, known, told)
    print(file=sys.stderr)
    seconds = {case.id: case.seconds for case in old}
    found = {}
    for choice in choices:
        values = {n: v for n, v in choice.items() if v != pairs.dimensions[n][0]}
        case = PairCase(json.loads(json.dumps(values)))
        found[case.id] = replace(case, seconds=seconds.get(case.id))
    write(name, [*found.values()], [dict(pair) for pair in impossible])
    print(f"{path_of(name)}: {len(found)} cases, {len(impossible)} impossible pairs")


def measure(name: str, again: bool) -> bool:
    """Run cases and note their seconds; return whether all pass. Cases that fail get no seconds."""
    cases, impossible = read(name)
    wanted = [case for case in cases if again or case.seconds is None]
    known = {case.id: case for case in cases}
    sizes = {case.id: case_of(name, case).world for case in wanted}
    good, done = True, 0
    for size in sorted(set(sizes.values())):
        of_size = [case for case in wanted if sizes[case.id] == size]
        for first in range(0, len(of_size), TOGETHER):
            some = of_size[first : first + TOGETHER]
            try:
                seconds = check_pairs(name, some)
            except AssertionError as error:
                good = False
                print(f"\n{error}", flush=True)
            else:
                measured = zip(some, seconds, strict=True)
                known |= {each.id: replace(each, seconds=round(s, 2)) for each, s in measured}
                write(name, [*known.values()], impossible)
            done += len(some)
            print(f"\r{done} of {len(wanted)} cases ", end="", file=sys.stderr, flush=True)
    total = sum(case.cost_s for case in known.values())
    print(f"\n{path_of(name)}: {len(known)} cases take {total:.0f} s", file=sys.stderr)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.pair_runs", description=__doc__)
    parser.add_argument("action", choices=["find", "measure"])
    parser.add_argument("matrix", choices=MATRICES)
    parser.add_argument("--again", action="store_true", help="not only what is new")
    given = parser.parse_args()
    if given.action == "find":
        find(given.matrix, given.again)
        return 0
    return int(not measure(given.matrix, given.again))


if __name__ == "__main__":
    sys.exit(main())
