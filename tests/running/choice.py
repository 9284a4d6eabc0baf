"""Chooses among the tests that are wanted for a change, as there is time for a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.running.coverage_records import function_of
from tests.running.map_file import SHARED, CoverageMap
from tests.running.wanted import Wanted

UNKNOWN_S = 2.0
"""Seconds assumed for a test that is not in the map."""


@dataclass
class Choice:
    """The tests that run, and those for which there is no time."""

    chosen: dict[str, float] = field(default_factory=dict)
    """Test -> its seconds, with those of shared fixtures that it is the first to need."""
    left: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """File of tests -> the seconds of those that run."""

    @property
    def total_s(self) -> float:
        """Seconds of all tests that run, one after the other."""
        return sum(self.seconds.values())

    @property
    def files(self) -> list[str]:
        """Files of the tests that run, the longest first."""
        return sorted(self.seconds, key=lambda file: -self.seconds[file])


def choose(
    known: CoverageMap, wanted: Sequence[Wanted], total_s: float, longest_s: float
) -> Choice:
    """Choose tests that take at most `total_s` together, and `longest_s` in each file of tests.

    The changed file with the least seconds so far has its next test chosen.
    """
    choice = Choice()
    spent = {each.file: 0.0 for each in wanted}
    waiting = {each.file: [*each.tests] for each in wanted}
    while waiting := {file: tests for file, tests in waiting.items() if tests}:
        changed = min(waiting, key=lambda file: spent[file])
        test = waiting[changed].pop(0)
        if {test, function_of(test)} & choice.chosen.keys() or test in choice.left:
            continue
        file = test.partition("::")[0]
        seconds = seconds_of(known, test)
        if file not in choice.seconds:
            seconds += known.seconds.get(file, {}).get(SHARED, 0.0)
        file_s = choice.seconds.get(file, 0.0) + seconds
        if choice.total_s + seconds > total_s or file_s > longest_s:
            choice.left.append(test)
            continue
        choice.seconds[file] = file_s
        choice.chosen[test] = seconds
        spent[changed] += seconds
    return choice


def seconds_of(known: CoverageMap, test: str) -> float:
    """Return the seconds of a test with all its cases, by the map or a guess."""
    file, _, name = test.partition("::")
    cases = [
        seconds
        for case, seconds in known.seconds.get(file, {}).items()
        if name in (case, function_of(case))
    ]
    return sum(cases) if cases else UNKNOWN_S
