"""Partition into stages: the layout string, its proof, and the optimum by cost."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.model.partition import StageSpec, balanced, format_layout, from_counts, parse_layout
from megapipe.schedule.placement import Placement, loop, mirrored, replicated, vee, wave


def test_layout_string() -> None:
    assert parse_layout("E L*3 | L*4 | L | L*2 H", 10) == (
        StageSpec(True, range(3), False),
        StageSpec(False, range(3, 7), False),
        StageSpec(False, range(7, 8), False),
        StageSpec(False, range(8, 10), True),
    )


@pytest.mark.parametrize("text", ["E|L*4|H", "ELL|LLH", " E L * 2 L|  L H ", "E L*4 H"])
def test_spellings(text: str) -> None:
    specs = parse_layout(text, 4)
    assert [layer for spec in specs for layer in spec.layers] == [0, 1, 2, 3]
    assert parse_layout(format_layout(specs), 4) == specs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "stage 0 is empty"),
        ("E L*2 || L*2 H", "stage 1 is empty"),
        ("E L*4 | H |", "stage 2 is empty"),
        ("E L*3 | H", "places 3 layers, but model.layers is 4"),
        ("E L*3 | L*2 H", "places 5 layers, but model.layers is 4"),
        ("L*4 H", "has 0 times E"),
        ("E L*4", "has 0 times H"),
        ("E L*2 | E L*2 H", "has 2 times E"),
        ("E L*2 H | L*2 H", "has 2 times H"),
        ("L E L*3 H", "E (the embedding) must come first"),
        ("E L*2 | H L*2", "H (the head) must come last"),
        ("E L*4 H | L", "H (the head) must come last"),
        ("E L*0 L*4 H", "is not E, L, L*n or H"),
        ("E L*-1 | L*5 H", "is not E, L, L*n or H"),
        ("E L*2 | X L*2 H", "stage 1: 'X L*2 H' is not E, L, L*n or H"),
        ("E L*99999999 H", "is not E, L, L*n or H"),
        ("E, L*4, H", "is not E, L, L*n or H"),
    ],
)
def test_bad_layout(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, 4)
    assert words in str(caught.value)
    assert str(caught.value).startswith("pipeline.stage_layout=")
    assert "\n" not in str(caught.value)


def test_counts() -> None:
    assert from_counts([3, 4, 4, 3]) == "E L*3 | L*4 | L*4 | L*3 H"
    assert from_counts([0, 4, 0]) == "E | L*4 | H"
    assert from_counts([5]) == "E L*5 H"
    for wrong in ([], [3, -1]):
        with pytest.raises(ConfigError, match="one layer count per stage"):
            from_counts(wrong)
    with pytest.raises(ConfigError, match="stage 1 is empty"):
        parse_layout(from_counts([2, 0, 2]), 4)


@pytest.mark.parametrize(
    ("layers", "stages", "head", "layout"),
    [
        (14, 4, 0.5, "E L*3 | L*4 | L*4 | L*3 H"),
        (12, 4, 4.5, "E L*4 | L*4 | L*4 | H"),
        (12, 1, 4.5, "E L*12 H"),
        (80, 8, 1.0, "E L*10" + " | L*10" * 6 + " | L*10 H"),
        (3, 5, 0.1, "E | L | L | L | H"),
    ],
)
def test_balanced_over_single_stages(layers: int, stages: int, head: float, layout: str) -> None:
    assert balanced([0, *[1.0] * layers, head], loop(stages)) == layout


@pytest.mark.parametrize(
    ("layers", "placement", "head", "layout"),
    [
        # 7 layers on each rank, where stages of equal cost leave 8 to the one without the head
        (13, loop(2, 2), 1, "E L*3 | L*3 | L*4 | L*3 H"),
        (14, loop(2, 2), 2, "E L*4 | L*4 | L*4 | L*2 H"),
        (15, vee(2), 1, "E L*4 | L*4 | L*4 | L*3 H"),
        (6, mirrored(loop(2)), 2, "E L*4 | L*2 H"),
        # a stage with c ranks gets c times as many
        (9, replicated([2, 1]), 0, "E L*6 | L*3 H"),
        (12, replicated([1, 2, 1]), 0, "E L*3 | L*6 | L*3 H"),
        (8, replicated([3, 1]), 1, "E L*7 | L H"),
    ],
)
def test_balanced_over_ranks(layers: int, placement: Placement, head: int, layout: str) -> None:
    assert balanced([0, *[1] * layers, head], placement) == layout


def test_more_stages_than_items() -> None:
    with pytest.raises(ConfigError, match=r"6 pipeline stages .* at most 5 stages"):
        balanced([0, 1, 1, 1, 1], loop(6))


def placements() -> Iterator[Placement]:
    for ranks in (1, 2, 3):
        yield from (loop(ranks), loop(ranks, 2), vee(ranks), mirrored(loop(ranks)))
    yield from (loop(4), loop(5), loop(6), loop(2, 3), wave(1), wave(2, 1), mirrored(loop(2, 2)))
    yield from (replicated(counts) for counts in ([2, 1], [1, 2], [2, 1, 1], [2, 2]))


@settings(max_examples=150)
@given(
    layers=st.integers(1, 9),
    placement=st.sampled_from(list(placements())),
    layer=st.integers(1, 5),
    embedding=st.integers(0, 12),
    head=st.integers(0, 30),
)
def test_balanced_is_optimal(
    layers: int, placement: Placement, layer: int, embedding: int, head: int
) -> None:
    """No partition is better by the busiest rank, then the slowest stage, then the squares."""
    stages = placement.stages
    if stages > layers + 2:
        return
    items = ["E", *["L"] * layers, "H"]

    def score(counts: list[int]) -> tuple[int, int, int]:
        costs = [layer * count for count in counts]
        costs[0] += embedding
        costs[-1] += head
        loads = Counter[int]()
        for row in placement.table:
            for rank, cost in zip(row, costs, strict=True):
                loads[rank] += cost
        return max(loads.values()), max(costs), sum(cost**2 for cost in costs)

    cuts = combinations(range(1, len(items)), stages - 1)
    edges = ([0, *inner, len(items)] for inner in cuts)
    scores = [score([items[a:b].count("L") for a, b in pairwise(each)]) for each in edges]
    specs = parse_layout(balanced([embedding, *[layer] * layers, head], placement), layers)
    assert len(specs) == stages
    assert score([len(spec.layers) for spec in specs]) == min(scores)


@settings(max_examples=100)
@given(
    layers=st.integers(3, 10),
    speeds=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=3),
    head=st.integers(0, 6),
    uneven=st.booleans(),
)
def test_balanced_over_unequal_ranks(
    layers: int, speeds: list[int], head: int, uneven: bool
) -> None:
    """No cut is faster on the slowest rank. Layers of several costs may be cut a little worse: the
    search moves one border at a time."""
    costs = [1 + (uneven and n % 3 == 0) for n in range(layers)]
    relative = [Fraction(speed, 4) for speed in speeds]

    def slowest(counts: Sequence[int]) -> Fraction:
        borders = [0, *accumulate(counts)]
        times = [Fraction(sum(costs[a:b])) for a, b in pairwise(borders)]
        times[-1] += head
        return max(time / speed for time, speed in zip(times, relative, strict=True))

    text = balanced([0, *costs, head], loop(len(speeds)), speeds=relative)
    counts = [len(spec.layers) for spec in parse_layout(text, layers)]
    cuts = (
        [b - a for a, b in pairwise((0, *borders, layers))]
        for borders in combinations_with_replacement(range(layers + 1), len(speeds) - 1)
    )
    inner = (cut for cut in cuts if all(cut[1:-1]))
    assert slowest(counts) <= min(map(slowest, inner)) * (Fraction(5, 4) if uneven else 1)
