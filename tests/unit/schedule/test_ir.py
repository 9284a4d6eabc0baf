"""Packing, views and the CSV form of schedules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules
from torch.distributed.pipelining.schedules import _Action

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed, span, unpack
from megapipe.schedule.placement import loop


@settings(deadline=None)
@given(
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**16 - 1),
)
def test_pack_and_unpack_are_inverse_and_leave_flag_bits_free(kind, stage, microbatch, part):
    code = pack(kind, stage, microbatch, part)
    assert unpack(code) == Op(kind, stage, microbatch, part)
    assert 0 <= code < 2**60


@pytest.mark.parametrize("numbers", [(16, 0, 0, 0), (0, 2**16, 0, 0), (0, 0, 2**24, 0), (0, -1, 0)])
def test_pack_refuses_what_does_not_fit(numbers):
    with pytest.raises(ScheduleError, match="does not fit"):
        pack(*numbers)


def test_unpack_refuses_an_unknown_kind():
    with pytest.raises(ScheduleError, match="kind 5 is unknown"):
        unpack(pack(5, 0, 0))


def test_span_is_a_run_of_packed_operations():
    assert list(span(Kind.W, 3, 2, 5)) == [pack(Kind.W, 3, mb) for mb in (2, 3, 4)]
    assert list(span(Kind.F, 0, 2, 2)) == []


def test_text_of_an_operation():
    assert str(Op(Kind.F, 2, 5)) == "2F5"
    assert str(Op(Kind.I, 0, 13, 2)) == "0I13.2"


def test_csv_is_what_torch_writes():
    schedule = build("zb_h1", ranks=2, microbatches=2)
    assert schedule.to_csv() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    for row in build("1f1b", ranks=3, microbatches=4).to_csv().splitlines():
        for cell in row.split(","):
            assert repr(_Action.from_str(cell)) == cell


@settings(deadline=None)
@given(schedules())
def test_csv_there_and_back(schedule):
    again = Schedule.from_csv(
        schedule.to_csv(), name=schedule.name, forward_only=schedule.forward_only
    )
    assert (again.ops, again.placement, again.microbatches) == (
        schedule.ops,
        schedule.placement,
        schedule.microbatches,
    )


def test_csv_with_idle_slots_and_windows_line_ends():
    schedule = Schedule.from_csv("0F0,,, 0B0\r\n,1F0,1B0,\r\n", name="torch")
    assert schedule.rank_ops(0) == [Op(Kind.F, 0, 0), Op(Kind.B, 0, 0)]
    assert schedule.rank_ops(1) == [Op(Kind.F, 1, 0), Op(Kind.B, 1, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"row 1, cell 2: '0X0' is not an operation; write stage, kind"),
        ("0F0,(0F1;1B0)OVERLAP_F_B\n", r"is not an operation"),
        ("0F0,0B0\n0F1\n", r"0F1 is in row 2 but stage 0 began in row 1"),
        ("0F0,0B0\n2F0,2B0\n", r"stage 1 has no operation"),
        ("99999F0\n", r"stage 0 has no operation"),
        ("", r"stage 0 has no operation"),
        ("0F0\n,\n", r"rank 1 has no stage"),
        ("0F99999999\n", r"does not fit"),
    ],
)
def test_csv_that_cannot_be_read(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_sizes_must_agree():
    one = packed(span(Kind.F, 0, 0, 1))
    with pytest.raises(ScheduleError, match="1 lists of operations for 2 ranks"):
        Schedule("x", loop(2), 1, (one,))
    with pytest.raises(ScheduleError, match="2 limits for 1 ranks"):
        Schedule("x", loop(1), 1, (one,), held_limit=(1, 1))
    with pytest.raises(ScheduleError, match="microbatches must be from 1 to 16777215, not 0"):
        Schedule("x", loop(1), 0, (one,))
