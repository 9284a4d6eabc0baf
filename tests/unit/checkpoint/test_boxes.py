from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint.boxes import Box, flat_boxes, intersect, miscovered, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape, beyond=0):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o + beyond)) for o, n in zip(offsets, shape, strict=True))
    return Box(offsets, sizes)


def members(box):
    return list(product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_flat_boxes_rebuild_the_range(data):
    shape = data.draw(SHAPES)
    tensor = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    cuts = flat_boxes(shape, start, stop)
    found, expected_position = [], 0
    for position, box in cuts:
        assert position == expected_position
        assert box.numel > 0
        assert box.fits(shape)
        found += tensor[box.inside(whole(shape))].reshape(-1).tolist()
        expected_position += box.numel
    assert found == list(range(start, stop))
    assert len(cuts) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, [(0, Box((), ()))]),
        ((), 1, 1, []),
        ((7,), 2, 5, [(0, Box((2,), (3,)))]),
        ((3, 4), 0, 12, [(0, Box((0, 0), (3, 4)))]),
        ((3, 4), 5, 7, [(0, Box((1, 1), (1, 2)))]),
        (
            (4, 4),
            2,
            13,
            [(0, Box((0, 2), (1, 2))), (2, Box((1, 0), (2, 4))), (10, Box((3, 0), (1, 1)))],
        ),
        ((2, 3, 4), 4, 12, [(0, Box((0, 1, 0), (1, 2, 4)))]),
        ((5, 0), 0, 0, []),
    ],
)
def test_flat_boxes_table(shape, start, stop, boxes):
    assert flat_boxes(shape, start, stop) == boxes


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 13)])
def test_flat_boxes_refuse_a_range_outside(start, stop):
    with pytest.raises(ValueError, match="12 elements"):
        flat_boxes((3, 4), start, stop)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_intersect_is_the_common_elements(data):
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = intersect(a, b)
    expected = sorted(set(members(a)) & set(members(b)))
    assert (members(common) if common else []) == expected
    assert intersect(b, a) == common


def reference_miscovered(shape, boxes):
    counts = Counter(element for box in boxes for element in members(box))
    every = set(members(whole(shape))) | set(counts)
    wrong = [e for e in every if counts[e] != (e in set(members(whole(shape))))]
    return (min(wrong), counts[min(wrong)]) if wrong else None


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_miscovered_agrees_with_counting(data):
    """Any boxes at all: mostly wrong tilings, some of them by an overlap as big as a hole."""
    shape = data.draw(SHAPES)
    boxes = data.draw(st.lists(boxes_in(shape, beyond=data.draw(st.integers(0, 1))), max_size=5))
    assert miscovered(shape, boxes) == reference_miscovered(shape, boxes)


@st.composite
def tilings(draw, box):
    """Recursive guillotine cuts of a box."""
    cuttable = [d for d, n in enumerate(box.sizes) if n > 1]
    if not cuttable or draw(st.integers(0, 3)) == 0:
        return [box]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.sizes[d] - 1))
    low = Box(box.offsets, (*box.sizes[:d], at, *box.sizes[d + 1 :]))
    high = Box(
        (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :]),
        (*box.sizes[:d], box.sizes[d] - at, *box.sizes[d + 1 :]),
    )
    return draw(tilings(low)) + draw(tilings(high))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_tilings_are_proved_and_their_mutants_refused(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    boxes = data.draw(st.permutations(data.draw(tilings(whole(shape)))))
    assert miscovered(shape, boxes) is None
    victim = data.draw(st.sampled_from(boxes))
    without = [box for box in boxes if box is not victim]
    assert miscovered(shape, without) == (victim.offsets, 0)
    assert miscovered(shape, [*boxes, victim]) == (victim.offsets, 2)


def test_a_hole_as_big_as_an_overlap_is_seen():
    boxes = [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((1, 0), (2, 4))]
    assert miscovered((4, 4), boxes) == ((1, 0), 2)


def test_many_pieces_are_proved_in_linear_time():
    """200,000 elements in 20,000 slices, and a grid of 128 x 128: seconds if it were quadratic."""
    slices = [box for k in range(20_000) for _, box in flat_boxes((500, 400), 10 * k, 10 * k + 10)]
    grid = [Box((i, j), (1, 1)) for i, j in product(range(128), repeat=2)]
    assert miscovered((500, 400), slices) is None
    assert miscovered((128, 128), grid) is None
    assert miscovered((128, 128), grid[:-1]) == ((127, 127), 0)


@pytest.mark.parametrize(
    "box",
    [Box((0,), (3,)), Box((0, 0), (4, 4)), Box((-1, 0), (1, 1)), Box((0, 0), (-1, 1))],
)
def test_fits_refuses(box):
    assert not box.fits((3, 4))
