"""What a run draws from long lists: the same for one commit, and all of it in some commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.parity import case_file, draw, pair_runs
from tests.parity.tiers import in_parts, one_of


@dataclass(frozen=True)
class Item:
    id: str
    cost_s: float


ITEMS = [Item(f"item {i}", 1 + i % 3) for i in range(30)]
SEEDS = [f"tree {i}" for i in range(80)]


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def given(value: str) -> None:
        monkeypatch.setenv(draw.VARIABLE, value)
        draw.seed.cache_clear()

    yield given
    draw.seed.cache_clear()


def test_one_seed_draws_the_same_and_another_something_else() -> None:
    (one,), (same,), (other,) = (draw.draws(ITEMS, [name], 12) for name in "aab")
    assert one == same != other
    assert sum(item.cost_s for item in one) <= 12


def test_what_has_waited_longest_comes_first() -> None:
    """If three runs have room for all, the third therefore has what the others lack."""
    items = [Item(item.id, 1) for item in ITEMS]
    runs = draw.draws(items, SEEDS[:3], 10)
    assert sorted(item.id for run in runs for item in run) == sorted(item.id for item in items)


def test_an_item_that_takes_longer_than_all_time_does_not_stop_the_others() -> None:
    ((run,),) = (draw.draws([Item("long", 9), Item("short", 1)], ["a"], 2),)
    assert [item.id for item in run] == ["short"]


@pytest.mark.parametrize("matrix", case_file.BUDGETS_S)
def test_some_commits_have_nearly_all_cases(matrix: str) -> None:
    cases, _ = case_file.read(matrix)
    runs = draw.draws(cases, SEEDS[: case_file.COMMITS], case_file.BUDGETS_S[matrix])
    had = {case.id for run in runs for case in run}
    assert len(had) >= case_file.SHARE * len(cases)


@pytest.mark.parametrize("matrix", case_file.BUDGETS_S)
def test_names_of_cases_are_names(matrix: str) -> None:
    cases, _ = case_file.read(matrix)
    assert len({case.id for case in cases}) == len(cases)


def test_what_is_wrong_has_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = case_file.read("parity")[0][:3]
    monkeypatch.setattr(pair_runs, "run_cases", lambda cases, name: ([1.0] * 3, {1: "off by 1"}))
    with pytest.raises(AssertionError) as caught:
        pair_runs.check_pairs("parity", cases)
    test = "python -m pytest tests/dist/test_parity.py -m full -k drawn"
    assert str(caught.value) == f"off by 1\nto repeat it: {test} --case {cases[1].id}"


def marks_of(decorator: pytest.MarkDecorator) -> list[str]:
    """Return for each value its mark, or "" if it is run by default."""
    return [next((mark.name for mark in each.marks), "") for each in decorator.args[1]]


def test_a_part_begins_where_the_seed_says(seed: Any) -> None:
    found = set()
    for name in SEEDS:
        seed(name)
        marks = marks_of(in_parts("value", "abcdefgh", full=4))
        assert [i % 4 for i, mark in enumerate(marks) if mark == "full"] == [
            marks.index("full")
        ] * 2
        assert set(marks) == {"full", "slow"}
        found.add(marks.index("full"))
    assert found == {0, 1, 2, 3}, "all have their turn"


def test_parts_by_name_and_parts_larger_than_the_list(seed: Any) -> None:
    seed("a")
    assert marks_of(in_parts("value", "abc", default=["a"], full=1)) == ["", "full", "full"]
    assert marks_of(in_parts("value", "ab", full=9)).count("full") == 1


def test_one_of_some_slices(seed: Any) -> None:
    seed("a")
    decorator = one_of(3)
    assert [each.values[0] for each in decorator.args[1]] == [slice(i, None, 3) for i in range(3)]
    assert sorted(marks_of(decorator)) == ["full", "slow", "slow"]
