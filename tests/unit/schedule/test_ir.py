"""Packing and the views of schedules."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import JOINED, Kind, Op, Schedule, pack, packed, span, unpack
from megapipe.schedule.placement import loop, mirrored


@given(
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**16 - 1),
    st.booleans(),
)
def test_pack_and_unpack_are_inverse_and_leave_the_highest_bits_free(
    kind, stage, microbatch, part, joined
):
    code = pack(kind, stage, microbatch, part, joined)
    assert unpack(code) == Op(kind, stage, microbatch, part, joined)
    assert 0 <= code < 2**61
    assert (code >= JOINED) == joined


@pytest.mark.parametrize(
    "numbers", [(16, 0, 0, 0), (0, 2**16, 0, 0), (0, 0, 2**24, 0), (0, 0, 0, 2**16), (0, -1, 0)]
)
def test_pack_refuses_what_does_not_fit(numbers):
    with pytest.raises(ScheduleError, match="does not fit"):
        pack(*numbers)


def test_unpack_refuses_an_unknown_kind():
    with pytest.raises(ScheduleError, match="kind 6 is unknown"):
        unpack(pack(6, 0, 0))


def test_span_is_a_run_of_packed_operations():
    assert list(span(Kind.W, 3, 2, 5)) == [pack(Kind.W, 3, mb) for mb in (2, 3, 4)]
    assert list(span(Kind.F, 0, 2, 2)) == []


def test_text_of_an_operation():
    assert str(Op(Kind.F, 2, 5)) == "2F5"
    assert str(Op(Kind.I, 0, 13, 2)) == "0I13.2"
    assert str(Op(Kind.R, 1, 0, joined=True)) == "1R0"


ONE = packed(span(Kind.F, 0, 0, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": loop(2)}, r"1 lists of operations for 2 ranks; one per rank is needed"),
        ({"activation_bound": (1, 1)}, r"2 activation bounds for 1 ranks; one per rank is needed"),
        ({"direction": (0, 0)}, r"2 directions for 1 micro-batches; one per micro-batch is needed"),
        ({"sizes": ()}, r"0 sizes for 1 micro-batches; one per micro-batch is needed"),
        ({"microbatches": 0}, r"microbatches must be from 1 to 16777215, not 0"),
        ({"microbatches": 2**24}, r"microbatches must be from 1 to 16777215, not 16777216"),
        ({"slices": 0}, r"slices must be from 1 to 65535, not 0"),
        ({"direction": (1,)}, r"micro-batch 0 runs through direction 1; directions go from 0 to 0"),
        ({"sizes": (Fraction(0),)}, r"micro-batch 0 is 0 of a whole one; sizes are above 0 and"),
        ({"sizes": (Fraction(3, 2),)}, r"micro-batch 0 is 3/2 of a whole one"),
    ],
)
def test_sizes_must_agree(fields, message):
    given = {"placement": loop(1), "microbatches": 1, "ops": (ONE,), **fields}
    with pytest.raises(ScheduleError, match=f"schedule x: {message}"):
        Schedule("x", **given)


def test_whole_micro_batches_and_their_parts():
    half = Fraction(1, 2)
    plain = Schedule("x", loop(1), 3, (ONE,))
    assert (plain.whole_microbatches, plain.size_of(2), plain.direction_of(2)) == (3, 1, 0)
    parts = Schedule("x", mirrored(loop(1)), 3, (ONE,), direction=(0, 1, 1), sizes=(half, half, 1))
    assert (parts.whole_microbatches, parts.size_of(1), parts.direction_of(1)) == (2, half, 1)
