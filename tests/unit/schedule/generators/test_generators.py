"""Registered schedules: literal tables, peaks, and what holds for all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import (
    accepts,
    aliases,
    build,
    forward_only,
    gpipe_on,
    names,
    register,
)
from megapipe.schedule.generators.registry import HINTS, OPTIONS
from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import loop, mirrored, vee
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import all_small, references, registered
from tests.unit.schedule.schedule_referee import gradients_in_order, peaks


def lines(schedule):
    return to_csv(schedule).replace(",", " ").splitlines()


def test_gpipe_table():
    assert lines(build("gpipe", ranks=2, microbatches=2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]
    assert lines(build("gpipe", ranks=2, microbatches=2, chunks=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


def test_1f1b_table():
    assert lines(build("1f1b", ranks=3, microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_table():
    assert lines(build("zb_h1", ranks=3, microbatches=4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert lines(build("zb_h1", ranks=3, microbatches=1)) == [
        "0F0 0I0 0W0",
        "1F0 1I0 1W0",
        "2F0 2I0 2W0",
    ]


def test_forward_only_tables():
    assert lines(forward_only(loop(2), 3)) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    assert lines(forward_only(loop(2, 2), 3)) == [
        "0F0 0F1 2F0 0F2 2F1 2F2",
        "1F0 1F1 3F0 1F2 3F1 3F2",
    ]
    assert lines(forward_only(vee(2), 3)) == [
        "0F0 0F1 3F0 0F2 3F1 3F2",
        "1F0 2F0 1F1 2F1 1F2 2F2",
    ]


def test_gpipe_tables_of_everything():
    both = gpipe_on(mirrored(loop(2)), 3, direction=(0, 1, 0))
    assert lines(both) == ["0F0 0F2 1F1 1B1 0B0 0B2", "0F1 1F0 1F2 1B0 1B2 0B1"]
    assert lines(gpipe_on(loop(1), 2, slices=2)) == ["0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1"]


def check(schedule):
    """Check that proof and referee agree, gradients are in order, and peaks are as promised."""
    report = validate(schedule)
    assert report.peak_held == schedule.activation_bound == peaks(schedule)
    assert report.bitwise_order
    assert gradients_in_order(schedule)
    return report


@in_parts("name", names(), default=4, full=1)
def test_small_schedules(name):
    microbatches = 6 if accepts(name) >= {"chunks", "slices"} else 8
    cases = list(all_small(name, ranks=4, microbatches=microbatches))
    assert cases
    for schedule in cases:
        assert schedule.name == name
        assert not schedule.forward_only
        check(schedule)


@settings(max_examples=60)
@given(registered(max_ranks=10, max_microbatches=24))
def test_any_size(schedule):
    check(schedule)


@settings(max_examples=200)
@given(references())
def test_gpipe_and_forward_only_on_any_placement(schedule):
    report = check(schedule)
    units = schedule.placement.stages * schedule.microbatches * schedule.slices
    assert report.ops == units * (1 if schedule.forward_only else 2)


@pytest.mark.parametrize("name", names())
def test_parameters_of_a_generator(name):
    """It takes ranks, micro-batches and only options that `build` knows."""
    assert accepts(name) >= {"ranks", "microbatches"}
    assert accepts(name) <= {"ranks", "microbatches", *OPTIONS, *HINTS}


def test_aliases():
    """What each means is told by tables in the tests of its family."""
    assert aliases() == {
        "cut_in_half": "dualpipe_v",
        "dapple": "1f1b",
        "pipedream_flush": "1f1b",
    }
    assert not aliases().keys() & set(names())
    for alias, name in aliases().items():
        schedule = build(alias, ranks=4, microbatches=8)
        assert schedule.name == name
        assert validate(schedule).bitwise_order


@given(st.integers(1, 9), st.integers(1, 20))
def test_peaks_are_those_of_the_papers(ranks, microbatches):
    def peak(name):
        return validate(build(name, ranks=ranks, microbatches=microbatches)).peak_held

    assert peak("gpipe") == (microbatches,) * ranks
    assert peak("1f1b") == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert peak("zb_h1") == (min(ranks, microbatches),) * ranks


def test_names_are_sorted_and_complete():
    assert list(names()) == sorted(names())
    assert {"gpipe", "1f1b", "interleaved_1f1b", "zb_h1"} <= set(names())
    assert accepts("interleaved_1f1b") == {
        "ranks",
        "microbatches",
        "chunks",
        "microbatch_group_size",
    }


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'1f1b' is already registered"):
        register("1f1b")(lambda ranks, microbatches: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "1f1p"}, "schedule '1f1p' is unknown; did you mean '1f1b'?"),
        ({"name": "ÿ"}, "schedule 'ÿ' is unknown; the known ones are 1f1b, "),
        ({"name": "1f1b", "chunks": 2}, "schedule 1f1b: chunks must be 1, not 2; .*interleaved_1f"),
        ({"name": "1f1b", "slices": 2}, "schedule 1f1b: slices must be 1, not 2; .*seq1f1b"),
        ({"name": "dapple", "slices": 2}, "schedule dapple: slices must be 1, not 2"),
        (
            {"name": "zb_h1", "microbatch_group_size": 2},
            "schedule zb_h1: microbatch_group_size must not be given, not 2; .*interl",
        ),
        (
            {"name": "zb_h1", "chimera_pairs": 1},
            "schedule zb_h1: chimera_pairs must not be given, not 1; .*chimera",
        ),
        ({"name": "gpipe", "ranks": 0}, "schedule gpipe: ranks must be at least 1, not 0"),
        ({"name": "gpipe", "microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"name": "gpipe", "chunks": 0}, "chunks must be at least 1, not 0"),
        (
            {"name": "interleaved_1f1b", "microbatch_group_size": 5},
            "microbatch_group_size must be from 1 to microbatches = 4, not 5",
        ),
        (
            {"name": "interleaved_1f1b", "chunks": 2, "microbatch_group_size": 0},
            "microbatch_group_size must be at least 1, not 0",
        ),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        build(**{"ranks": 2, "microbatches": 4, **arguments})
    assert "\n" not in str(caught.value)


def test_what_a_schedule_does_not_have_may_be_said():
    plain = build("1f1b", ranks=2, microbatches=4)
    given = {
        "chunks": 1,
        "slices": 1,
        "microbatch_group_size": None,
        "chimera_pairs": None,
        "activation_limit": 3,
    }
    assert build("1f1b", ranks=2, microbatches=4, **given) == plain
    with pytest.raises(TypeError, match="build has no option 'chunk'"):
        build("1f1b", ranks=2, microbatches=4, chunk=1)


def test_kinds_of_each_schedule():
    for name, kinds in (("1f1b", {Kind.F, Kind.B}), ("zb_h1", {Kind.F, Kind.I, Kind.W})):
        assert {op.kind for op in build(name, ranks=3, microbatches=3).rank_ops(1)} == kinds
