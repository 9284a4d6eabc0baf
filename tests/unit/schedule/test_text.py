"""The text form of schedules: literal examples, there and back, and what cannot be read."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from torch.distributed.pipelining.schedules import _Action

from megapipe.errors import ScheduleError
from megapipe.schedule.channels import channels
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.placement import Placement, loop
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import from_csv, to_csv
from tests.unit.schedule.schedule_cases import of, schedules

F, B, I, W, R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R  # noqa: E741


def test_a_plain_schedule_is_what_torch_writes():
    schedule = build("zb_h1", ranks=2, microbatches=2)
    assert to_csv(schedule) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    for row in to_csv(build("1f1b", ranks=3, microbatches=4)).splitlines():
        for cell in row.split(","):
            assert repr(_Action.from_str(cell)) == cell


def test_text_of_everything_that_a_schedule_can_have():
    schedule = of(
        "0F0 0F1+0F2 0R0 0B0 0B1 0I2 0W2/1F0 1F1+1B0 1F2 1B1 1B2",
        3,
        sizes=(Fraction(1), Fraction(1, 2), Fraction(1, 2)),
        recompute=frozenset({0}),
    )
    assert to_csv(schedule) == (
        "# sizes 1 1/2 1/2\n"
        "# recompute 0\n"
        "0F0,(0F1;0F2)OVERLAP_F_B,0R0,0B0,0B1,0I2,0W2\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,1F2,1B1,1B2\n"
    )


def test_text_of_slices():
    schedule = of("0F0 0F0.1 0B0.1 0B0", slices=2)
    assert to_csv(schedule) == "0F0,0F0.1,0B0.1,0B0\n"


def test_cells_of_torch_with_overlap():
    pair = "(0F4;3B1)OVERLAP_F_B"
    assert repr(_Action.from_str(pair)) == pair


def test_reading_everything_that_a_schedule_can_have():
    schedule = from_csv(
        "# sizes 1/2 1/2 1\n"
        "# recompute 1 0\n"
        "0F0,(0F1;0F2)OVERLAP_F_B,0R0,0B0,0B1,0I2,0W2\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,1F2,1B1,1B2\n",
        name="mine",
    )
    assert schedule.name == "mine"
    assert schedule.placement == loop(2)
    assert (schedule.microbatches, schedule.slices, schedule.direction) == (3, 1, None)
    assert schedule.sizes == (Fraction(1, 2), Fraction(1, 2), 1)
    assert schedule.whole_microbatches == 2
    assert schedule.recompute == {0, 1}
    assert schedule.rank_ops(0) == [
        Op(F, 0, 0),
        Op(F, 0, 1, joined=True),
        Op(F, 0, 2),
        Op(R, 0, 0),
        Op(B, 0, 0),
        Op(B, 0, 1),
        Op(I, 0, 2),
        Op(W, 0, 2),
    ]
    assert schedule.rank_ops(1)[1:3] == [Op(F, 1, 1, joined=True), Op(B, 1, 0)]
    validate(schedule)


def test_slices_are_those_of_the_cells():
    schedule = from_csv("0F0,0F0.1,0F0.2,0B0.2,0B0.1,0B0\n")
    assert schedule.slices == 3
    assert schedule.rank_ops(0)[2] == Op(F, 0, 0, 2)
    validate(schedule)


def test_replicas_are_the_paths_of_the_micro_batches():
    """Down the ranks, up them, and down again: two directions."""
    schedule = from_csv(
        "0F0,0F2,1F1,1B1,0B0,0B2\n0F1,1F0,1F2,1B0,0B1,1B2\n",
    )
    assert schedule.placement == Placement(2, ((0, 1), (1, 0)))
    assert schedule.direction == (0, 1, 0)
    validate(schedule)


def test_idle_slots_and_windows_line_ends():
    schedule = from_csv("0F0,,, 0B0\r\n,1F0,1B0,\r\n")
    assert schedule.rank_ops(0) == [Op(F, 0, 0), Op(B, 0, 0)]
    assert schedule.rank_ops(1) == [Op(F, 1, 0), Op(B, 1, 0)]


def test_remarks_are_skipped():
    assert from_csv("# my schedule, with love\n0F0,0B0\n# the end\n").ops == of("0F0 0B0").ops


def test_forward_only_is_told():
    assert from_csv("0F0\n", forward_only=True).forward_only
    assert not from_csv("0F0,0B0\n").forward_only


@pytest.mark.full
@settings(max_examples=300)
@given(schedules())
def test_there_and_back(schedule):
    assume(all(schedule.ops))
    again = from_csv(to_csv(schedule), name=schedule.name, forward_only=schedule.forward_only)
    assert (again.ops, again.name, again.sizes) == (schedule.ops, schedule.name, schedule.sizes)
    assert (again.recompute, again.slices) == (schedule.recompute, schedule.slices)
    assert again.microbatches == schedule.microbatches
    for microbatch in range(schedule.microbatches):
        paths = [each.placement.table[each.direction_of(microbatch)] for each in (schedule, again)]
        assert paths[0] == paths[1]
    assert channels(again) == channels(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"schedule x: line 1, cell 2: '0X0' is not an operation; write stage, kind"),
        ("# note\n\n0F0,0F\n", r"schedule x: line 3, cell 2: '0F' is not an operation"),
        ("0F0,0SEND_F0\n", r"cell 2: '0SEND_F0' is not an operation"),
        ("0F0,(0F1)OVERLAP_F_B\n", r"'\(0F1\)OVERLAP_F_B' is not an operation"),
        ("0F0,(0F1;0B0;0F2)OVERLAP_F_B\n", r"line 1, cell 2: .* is not an operation"),
        ("0F0,(0F1;0X0)OVERLAP_F_B\n", r"line 1, cell 2: '0X0' is not an operation"),
        (
            "0F0,0B0\n0F1,0B1\n0B0\n",
            r"0B0 is in row 3, but row 1 has stage 0 of micro-batch 0 already",
        ),
        ("0F0,0B0\n2F0,2B0\n", r"1F0 is missing: stages go up to 2, micro-batches up to 0"),
        ("0F0,0B0,0F2,0B2\n", r"0F1 is missing: stages go up to 0, micro-batches up to 2"),
        ("0F0,1F0,0B1\n", r"1F1 is missing"),
        ("99999F0\n", r"0F0 is missing"),
        ("0F99999999\n", r"0F0 is missing"),
        ("0F0.99999\n", r"does not fit"),
        ("", r"schedule x: it has no operation"),
        ("# sizes 1\n,\n", r"schedule x: it has no operation"),
        ("0F0\n,\n", r"rank 1 has no stage"),
        ("# sizes 1/2 half\n0F0,0F1\n", r"schedule x: line 1: '# sizes 1/2 half' is not a list"),
        ("# sizes 1/0\n0F0\n", r"line 1: '# sizes 1/0' is not a list of numbers"),
        ("# recompute all\n0F0\n", r"line 1: '# recompute all' is not a list of numbers"),
        ("# sizes 1 1\n0F0,0B0\n", r"schedule x: 2 sizes for 1 micro-batches"),
        ("# sizes 2\n0F0,0B0\n", r"micro-batch 0 is 2 of a whole one"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(text, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        from_csv(text, name="x")
    assert "\n" not in str(caught.value)
