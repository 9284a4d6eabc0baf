"""Slices of any lengths compute what whole sequences do, and their times are measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.testing import run_world
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.ranks import Case, check_case, configure, run_cases
from tests.parity.tiers import in_parts

SHAPES = [
    Case(pp=2, m=3, lengths=(7, 5, 3, 1), masked=0.3),
    Case(pp=2, m=3, lengths=(1, 1, 9, 2, 3), model="llama", kv_heads=2, tied=False),
    Case(pp=3, m=3, lengths=(7, 5, 3, 1), model="mixed", masked=0.3),
    Case(pp=3, m=4, lengths=(1, 12, 3), uneven=True, layers=5),
    Case(pp=2, m=2, tp=2, lengths=(6, 4, 2, 4), sequence_parallel=True),
    Case(pp=2, m=3, tp=2, lengths=(7, 5, 3, 1), model="llama"),
]
GIVEN = [
    replace(case, schedule=schedule, slices=len(case.lengths or ()), sequence=16)
    for schedule in ("terapipe", "seq1f1b")
    for case in SHAPES
]
"""Cases with slice lengths that nobody would choose; the stages' costs play no part."""
BY_TIME = [
    Case(pp=2, m=1, schedule="terapipe", slice_overhead=1.5, sequence=16, masked=0.3),
    Case(pp=3, m=2, schedule="terapipe", slice_overhead=0.5, slice_attention=9.0, sequence=13),
    Case(pp=3, m=2, schedule="terapipe", slice_overhead=1.0, slices=4, sequence=17, model="llama"),
    Case(pp=2, tp=2, sequence_parallel=True, schedule="terapipe", slice_overhead=0, sequence=16),
    Case(pp=2, m=3, schedule="seq1f1b", slice_attention=60.0, slices=3, sequence=16),
    Case(pp=3, m=2, schedule="seq1f1b", slice_attention=60.0, slices=4, sequence=23, model="mixed"),
]


@in_parts("world", [2, 3, 4], full=[3])
@pytest.mark.parametrize("cases", [GIVEN, BY_TIME], ids=["given", "by time"])
def test_uneven_slices_train(cases: list[Case], world: int) -> None:
    """Loss, every gradient, gradient norm, and the weights after each step, in fp64."""
    cases = [case for case in cases if case.world == world]
    assert cases
    for case in cases:
        lengths = configure(case)[1].slice_lengths
        assert len(set(lengths)) > 1 or case.sequence_parallel, lengths
    results = run_world(world, run_cases, cases)
    for index, case in enumerate(cases):
        try:
            check_case(case, [outcomes[index] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


SETTINGS = {
    "train.sequence_length": "64",
    "pipeline.schedule": "terapipe",
    "parallel.tp": "2",
    "parallel.sequence_parallel": "true",
}


@pytest.mark.slow
def test_times_are_measured_and_cut_by(tmp_path: Path) -> None:
    """What --time-slices prints last are keys for a run, and it leaves no run behind."""
    given = {**tiny(tmp_path), **SETTINGS}
    outcome = run_forked(tmp_path, 2, *arguments(given), "--time-slices")
    assert set(outcome.codes) == {0}, outcome.text
    first, keys = outcome.text.splitlines()
    assert re.fullmatch(
        r"slices: 31 of 4 to 64 tokens, timed 5 times; the two numbers give their times to "
        r"\d+\.\d% \(rms\)",
        first,
    )
    number = r"(\d[\d.e+-]*)"
    assert re.fullmatch(
        rf"pipeline\.options\.slice_overhead_tokens={number} "
        rf"pipeline.slice_attention_cost={number}",
        keys,
    )
    assert not (tmp_path / "runs").exists()
    assert run_forked(tmp_path, 1, *arguments(given), *keys.split(), "--dry-run").codes == [0]


def test_nothing_is_timed_where_nothing_is_cut(tmp_path: Path) -> None:
    given = {**tiny(tmp_path), **SETTINGS, "pipeline.schedule": "1f1b"}
    outcome = run_forked(tmp_path, 2, *arguments(given), "--time-slices")
    outcome.assert_one_line(2, "--time-slices: pipeline.schedule=1f1b does not cut sequences")
