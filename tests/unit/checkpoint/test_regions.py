from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint.regions import Region, first_uncovered, flat_regions, intersect, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def regions_in(draw, shape, beyond=0):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o + beyond)) for o, n in zip(offsets, shape, strict=True))
    return Region(offsets, sizes)


def members(region):
    return list(
        product(*(range(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True)))
    )


@given(st.data())
@settings(max_examples=300)
def test_flat_regions_rebuild_the_range(data):
    shape = data.draw(SHAPES)
    tensor = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    cuts = flat_regions(shape, start, stop)
    found, expected_position = [], 0
    for position, region in cuts:
        assert position == expected_position
        assert region.numel > 0
        assert region.fits(shape)
        found += tensor[region.inside(whole(shape))].reshape(-1).tolist()
        expected_position += region.numel
    assert found == list(range(start, stop))
    assert len(cuts) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "regions"),
    [
        ((), 0, 1, [(0, Region((), ()))]),
        ((), 1, 1, []),
        ((7,), 2, 5, [(0, Region((2,), (3,)))]),
        ((3, 4), 0, 12, [(0, Region((0, 0), (3, 4)))]),
        ((3, 4), 5, 7, [(0, Region((1, 1), (1, 2)))]),
        (
            (4, 4),
            2,
            13,
            [
                (0, Region((0, 2), (1, 2))),
                (2, Region((1, 0), (2, 4))),
                (10, Region((3, 0), (1, 1))),
            ],
        ),
        ((2, 3, 4), 4, 12, [(0, Region((0, 1, 0), (1, 2, 4)))]),
        ((5, 0), 0, 0, []),
    ],
)
def test_flat_regions_table(shape, start, stop, regions):
    assert flat_regions(shape, start, stop) == regions


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 13)])
def test_flat_regions_refuse_a_range_outside(start, stop):
    with pytest.raises(ValueError, match="12 elements"):
        flat_regions((3, 4), start, stop)


@given(st.data())
@settings(max_examples=300)
def test_intersect_is_the_common_elements(data):
    shape = data.draw(SHAPES)
    a, b = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    common = intersect(a, b)
    expected = sorted(set(members(a)) & set(members(b)))
    assert (members(common) if common else []) == expected
    assert intersect(b, a) == common


def reference_miscovered(shape, regions):
    counts = Counter(element for region in regions for element in members(region))
    every = set(members(whole(shape))) | set(counts)
    wrong = [e for e in every if counts[e] != (e in set(members(whole(shape))))]
    return (min(wrong), counts[min(wrong)]) if wrong else None


@given(st.data())
@settings(max_examples=400)
def test_miscovered_agrees_with_counting(data):
    """Any regions at all: mostly wrong tilings, some of them by an overlap as big as a hole."""
    shape = data.draw(SHAPES)
    regions = data.draw(
        st.lists(regions_in(shape, beyond=data.draw(st.integers(0, 1))), max_size=5)
    )
    assert first_uncovered(shape, regions) == reference_miscovered(shape, regions)


@st.composite
def tilings(draw, region):
    """Draw recursive guillotine cuts of a region."""
    cuttable = [d for d, n in enumerate(region.sizes) if n > 1]
    if not cuttable or draw(st.integers(0, 3)) == 0:
        return [region]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, region.sizes[d] - 1))
    low = Region(region.offsets, (*region.sizes[:d], at, *region.sizes[d + 1 :]))
    high = Region(
        (*region.offsets[:d], region.offsets[d] + at, *region.offsets[d + 1 :]),
        (*region.sizes[:d], region.sizes[d] - at, *region.sizes[d + 1 :]),
    )
    return draw(tilings(low)) + draw(tilings(high))


@given(st.data())
@settings(max_examples=150)
def test_tilings_are_proved_and_their_mutants_refused(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    regions = data.draw(st.permutations(data.draw(tilings(whole(shape)))))
    assert first_uncovered(shape, regions) is None
    victim = data.draw(st.sampled_from(regions))
    without = [region for region in regions if region is not victim]
    assert first_uncovered(shape, without) == (victim.offsets, 0)
    assert first_uncovered(shape, [*regions, victim]) == (victim.offsets, 2)


def test_a_hole_as_big_as_an_overlap_is_seen():
    regions = [Region((0, 0), (2, 2)), Region((0, 2), (2, 2)), Region((1, 0), (2, 4))]
    assert first_uncovered((4, 4), regions) == ((1, 0), 2)


def test_many_pieces_are_proved_in_linear_time():
    """200,000 elements in 20,000 slices, and a grid of 128 x 128: seconds if it were quadratic."""
    slices = [
        region for k in range(20_000) for _, region in flat_regions((500, 400), 10 * k, 10 * k + 10)
    ]
    grid = [Region((i, j), (1, 1)) for i, j in product(range(128), repeat=2)]
    assert first_uncovered((500, 400), slices) is None
    assert first_uncovered((128, 128), grid) is None
    assert first_uncovered((128, 128), grid[:-1]) == ((127, 127), 0)


@pytest.mark.parametrize(
    "region",
    [Region((0,), (3,)), Region((0, 0), (4, 4)), Region((-1, 0), (1, 1)), Region((0, 0), (-1, 1))],
)
def test_fits_refuses(region):
    assert not region.fits((3, 4))
