"""Building blocks: what published schedules are made of, and what can be read from a block."""

from itertools import product

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.generators.blocks import (
    BuildingBlock,
    alive,
    peak,
    place_weight_grads,
    repeat,
)
from megapipe.schedule.generators.v_family import (
    one_f_one_b_v_block,
    v_half_block,
    v_min_block,
    v_zb_block,
    vee_block,
)
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.placement import loop
from megapipe.schedule.proof.validate import validate
from tests.unit.schedule.schedule_times import lines

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, p, 2 * p, 3 * p + 2)]


def hopping(ranks, forward, backward, kinds=(Kind.I, Kind.W), behind=0):
    """Build a block of one chunk per rank, in which W is `behind` periods later per rank."""
    last = forward * (ranks - 1)
    slots = {}
    for rank in range(ranks):
        back = last + 1 + backward * (ranks - 1 - rank)
        slots[Op(Kind.F, rank, 0)] = forward * rank
        slots[Op(kinds[0], rank, 0)] = back
        if len(kinds) > 1:
            slots[Op(kinds[1], rank, 0)] = back + 1 + 3 * behind * rank
    return BuildingBlock(loop(ranks), 3, slots)


def looping(ranks, chunks, forward, backward, kinds):
    """Build a block of p micro-batches per group, chunk after chunk."""
    slots = {}
    turn = forward * (ranks - 1) + 3 * (chunks - 1) * ranks + 1
    for rank, chunk, microbatch in product(range(ranks), range(chunks), range(ranks)):
        place = 3 * (chunk * ranks + microbatch)
        slots[Op(Kind.F, chunk * ranks + rank, microbatch)] = forward * rank + place
        back = turn + backward * (ranks - 1 - rank) + place
        for after, kind in enumerate(kinds):
            slots[Op(kind, (chunks - 1 - chunk) * ranks + rank, microbatch)] = back + after
    return BuildingBlock(loop(ranks, chunks), 3 * chunks * ranks, slots)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("1f1b", lambda p: hopping(p, 1, 2, kinds=[Kind.B])),
        ("eager_1f1b", lambda p: hopping(p, 1, 5, kinds=[Kind.B])),
        ("zb_h1", lambda p: hopping(p, 1, 2, behind=1)),
        ("zb_h2", lambda p: hopping(p, 1, 5, behind=2)),
        ("grouped_interleaved", lambda p: looping(p, 2, 1, 2, [Kind.I, Kind.W])),
    ],
)
def test_the_repeated_block_is_the_closed_form(name, make, p, m):
    assert repeat(make(p), m).ops == build(name, ranks=p, microbatches=m).ops


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize(("groups", "chunks"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 4)])
def test_interleaved_is_a_block_of_p_microbatches(p, groups, chunks):
    block = looping(p, chunks, 3, 3, [Kind.B])
    published = build("interleaved_1f1b", ranks=p, microbatches=groups * p, chunks=chunks)
    assert repeat(block, groups * p).ops == published.ops


@pytest.mark.parametrize("p", range(1, 9))
def test_peaks_read_from_blocks(p):
    assert peak(hopping(p, 1, 2, kinds=[Kind.B])) == tuple(p - rank for rank in range(p))
    assert peak(hopping(p, 1, 2, behind=1)) == (p,) * p
    assert peak(hopping(p, 1, 5, behind=2)) == (2 * p - 1,) * p
    interleaved = looping(p, 2, 3, 3, [Kind.B])
    assert alive(interleaved) == tuple(p + 2 * (p - 1 - rank) + 1 for rank in range(p))
    assert alive(looping(p, 2, 1, 2, [Kind.I, Kind.W])) == tuple(2 * p - rank for rank in range(p))
    assert peak(interleaved) == (3 * p,) * p


BLOCKS = [v_min_block, v_half_block, v_zb_block, one_f_one_b_v_block]


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("block_of", BLOCKS)
def test_what_a_repetition_holds(block_of, p):
    block = block_of(p)
    assert validate(repeat(block, 3 * p)).peak_held == alive(block)
    for m in (1, p):
        held = validate(repeat(block, m)).peak_held
        assert all(most <= bound for most, bound in zip(held, alive(block), strict=True))
    assert all(most <= bound for most, bound in zip(alive(block), peak(block), strict=True))


def test_weights_go_to_the_first_free_slots_after_their_inputs():
    hops = [1, 1, 1]
    block = vee_block(2, hops, 1, hops)
    assert [str(op) for op in block.pending] == ["3W0", "2W0", "1W0", "0W0"]
    dropped = place_weight_grads(block)
    assert dropped.pending == []
    added = {str(op): slot for op, slot in dropped.slots.items() if op not in block.slots}
    assert added == {"3W0": 5, "2W0": 9, "1W0": 10, "0W0": 8}
    assert lines(repeat(dropped, 2)) == [
        "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1",
        "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1",
    ]


def test_no_slot_left_for_a_weight_gradient():
    slots = {Op(Kind.F, 0, 0): 0, Op(Kind.I, 0, 0): 1}
    with pytest.raises(ScheduleError, match="rank 0 has no free slot for 0W0 in a period of 2"):
        place_weight_grads(BuildingBlock(loop(1), 2, slots))


def test_peaks_need_weight_gradients():
    block = vee_block(2, [1, 1, 1], 1, [1, 1, 1])
    for measure in (peak, alive):
        with pytest.raises(ScheduleError, match="3W0 has no slot yet; call place_weight_grads f"):
            measure(block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({(Kind.F, 1): None}, "1F0 is missing; each stage needs it"),
        ({(Kind.B, 0): None}, "0I0 is missing; each stage needs it"),
        ({(Kind.F, 1): 0}, "1F0 is in slot 0; it needs 0F0, so its earliest possible slot is 1"),
        ({(Kind.B, 1): 1}, "1B0 is in slot 1; it needs 1F0, so its earliest possible slot is 2"),
        ({(Kind.B, 0): 3}, "0B0 is in slot 3; it needs 1B0, so its earliest possible slot is 4"),
        ({(Kind.B, 0): 5}, "0F0 are both on rank 0 in slot 0 of the period of 3; a rank has one"),
    ],
)
def test_what_is_no_block(change, message):
    slots = {(Kind.F, 0): 0, (Kind.F, 1): 1, (Kind.B, 1): 2, (Kind.B, 0): 4} | change
    with pytest.raises(ScheduleError, match=message) as caught:
        BuildingBlock(loop(2), 3, {Op(*op, 0): at for op, at in slots.items() if at is not None})
    assert "\n" not in str(caught.value)
