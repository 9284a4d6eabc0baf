"""Policies against all possible maps, and against formulas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest

from megapipe.experts.balance import balance
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import balanced_owners, find_pool, largest_load, migrate, moves
from megapipe.experts.row_routing import TokensPerExpert, evenly, rows_on, tokens_per_rank
from megapipe.experts.shadow import ShadowCosts, shadow


def rows(seed: int, ranks: int, experts: int) -> list[list[int]]:
    """Draw rows with a random skew, alike on all ranks or different on each."""
    draw = random.Random(seed)
    skew = draw.choice([0, 1, 2])
    weights = [1 / (i + 1) ** skew for i in range(experts)]
    draw.shuffle(weights)
    if draw.random() < 0.5:
        return evenly([int(draw.random() * 3000 * w) + 1 for w in weights], ranks)
    return [[int(draw.random() * 1000 * w) for w in weights] for _ in range(ranks)]


def shadowed(found: ExpertMap) -> set[int]:
    """Return the experts that have replicas, and assert that each is on all ranks."""
    copied = {expert for copies in found.replicas for expert in copies}
    assert all(len(found.holders(expert)) == found.ranks for expert in copied)
    return copied


@pytest.mark.parametrize("seed", range(30))
def test_shadows_are_the_best_prefix(seed: int) -> None:
    """FasterMoE: i shadows take 3 c B + 4 x B + i S. With one expert on each rank, B is the rows of
    the expert that is next in descending order, and 0 when all are shadows."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 6)
    counts = rows(seed, ranks, ranks)
    c, x, copy = draw.uniform(0, 2), draw.uniform(0, 2), draw.uniform(0, 1500)
    totals = sorted(map(sum, zip(*counts, strict=True)), reverse=True)
    seconds = [3 * c * b + 4 * x * b + i * copy for i, b in enumerate([*totals, 0])]
    found = shadow(ExpertMap.even(ranks, ranks, ranks), counts, ShadowCosts(c, x, copy))
    copied = shadowed(found)
    assert len(copied) == seconds.index(min(seconds))
    of_all = list(map(sum, zip(*counts, strict=True)))
    assert sorted((of_all[e] for e in copied), reverse=True) == totals[: len(copied)]


@pytest.mark.parametrize("seed", range(20))
def test_shadows_of_ranks_with_several_experts(seed: int) -> None:
    """The prefix is the best of all that the slots have room for. B is the rows of a rank's experts
    that are no shadows."""
    draw = random.Random(seed)
    begin = ExpertMap.even(6, 3, draw.randint(1, 6))
    counts, copy = rows(seed, 3, 6), draw.uniform(0, 1500)
    totals = list(map(sum, zip(*counts, strict=True)))
    order = sorted(range(6), key=lambda e: (-totals[e], e))
    best: tuple[float, set[int]] | None = None
    for i in range(7):
        copied = set(order[:i])
        owned = [{e for e in range(6) if e // 2 == rank} for rank in range(3)]
        if max(len(copied - own) for own in owned) > begin.slots:
            continue
        most = max(sum(totals[e] for e in own - copied) for own in owned)
        seconds = 7 * most + i * copy
        if best is None or seconds < best[0]:
            best = seconds, copied
    assert best is not None
    assert shadowed(shadow(begin, counts, ShadowCosts(1, 1, copy))) == best[1]


def test_two_equal_experts_are_shadowed_together() -> None:
    """A shadow of one of them alone takes nothing off the largest load."""
    begin = ExpertMap.even(4, 4, 4)
    assert shadowed(shadow(begin, evenly([40, 40, 4, 4], 4), ShadowCosts(1, 0, 50))) == {0, 1}
    assert shadowed(shadow(begin, evenly([40, 40, 4, 4], 4), ShadowCosts(1, 0, 55))) == set()


def all_copies(begin: ExpertMap) -> Iterator[list[tuple[int, ...]]]:
    """Yield every choice of expert replicas that the slots have room for."""
    each = []
    for rank in range(begin.ranks):
        others = [e for e, owner in enumerate(begin.owners) if owner != rank]
        sizes = range(begin.slots + 1)
        each.append([some for size in sizes for some in combinations(others, size)])
    for copies in product(*each):
        yield list(copies)


def least(begin: ExpertMap, counts: TokensPerExpert) -> int:
    """Return the smallest largest load with any replicas, by a table of rows per set of holders."""
    ranks, table = range(begin.ranks), {}
    for expert, mask in product(range(begin.experts), product((0, 1), repeat=begin.ranks)):
        holders = {begin.owners[expert], *(rank for rank in ranks if mask[rank])}
        table[expert, mask] = rows_on(sorted(holders), counts, expert, begin.ranks)
    found = []
    for copies in all_copies(begin):
        masks = [tuple(int(e in copies[rank]) for rank in ranks) for e in range(begin.experts)]
        each = [table[e, mask] for e, mask in enumerate(masks)]
        found.append(max(map(sum, zip(*each, strict=True))))
    return min(found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("experts", "slots"), [(3, 1), (3, 2), (6, 1), (6, 2)])
def test_copies_are_nearly_the_best(experts: int, slots: int, seed: int) -> None:
    """FlexMoE: on 3 ranks the largest load is within 10% of the best with any replicas."""
    begin = ExpertMap.even(experts, 3, slots)
    for number in range(1 if experts == 6 else 8):
        counts = rows(100 * seed + number, 3, experts)
        found = balance(begin, counts, 3)
        assert found.owners == begin.owners
        assert max(tokens_per_rank(found, counts, 3)) <= 1.1 * least(begin, counts)


def test_copies_that_help_together_alone() -> None:
    """Any one copy makes the largest load larger; with all experts everywhere it is the least."""
    begin, counts = ExpertMap.even(3, 3, 2), evenly([864, 728, 655], 3)
    assert max(tokens_per_rank(balance(begin, counts, 3), counts, 3)) == least(begin, counts) == 750


def test_copies_that_no_rank_needs_are_not_made() -> None:
    begin = ExpertMap.even(6, 3, 2)
    assert balance(begin, evenly([30] * 6, 3), 3) == begin
    before = begin.with_replicas([[2], [4], [0]])
    assert balance(before, evenly([30] * 6, 3), 3) == begin, "whatever there was"
    uneven = evenly([90, 30, 30, 0, 0, 30], 3)
    found = balance(begin, uneven, 3)
    for rank, copies in enumerate(found.replicas):
        for expert in copies:
            fewer = [
                [e for e in own if (r, e) != (rank, expert)] for r, own in enumerate(found.replicas)
            ]
            without = found.with_replicas(fewer)
            assert max(tokens_per_rank(without, uneven, 3)) > max(tokens_per_rank(found, uneven, 3))


def test_owners_are_packed_evenly() -> None:
    """They are within 2% of the best owners of six experts, and ranks keep what they have."""
    begin = ExpertMap.even(6, 3)
    for seed in range(12):
        totals = list(map(sum, zip(*rows(seed, 3, 6), strict=True)))
        best = min(
            max(totals[a] + totals[b], totals[c] + totals[d], totals[e] + totals[f])
            for a, b, c, d, e, f in permutations(range(6))
        )
        assert largest_load(balanced_owners(begin, totals), totals) <= 1.02 * best
    assert balanced_owners(begin, [5] * 6).owners.count(0) == 2
    assert balanced_owners(ExpertMap((2, 1, 0), ((),) * 3), [3, 2, 1]).owners == (2, 1, 0)


def test_a_move_has_to_be_worth_it() -> None:
    """Owners change where the largest load falls by more than moves count, and for nothing else."""
    begin, other = ExpertMap.even(4, 2), ExpertMap((0, 1, 0, 1), ((), ()))
    totals = [6, 6, 1, 1]
    assert [largest_load(each, totals) for each in (begin, other)] == [12, 7]
    assert moves(begin, other) == 1
    assert migrate(begin, [other], totals) == other
    assert migrate(begin, [other], totals, worth=4.9) == other
    assert migrate(begin, [other], totals, worth=5.0) == begin
    assert migrate(other, [begin], [1, 1, 1, 1]) == other, "of equal ones the present"


def test_a_pool_serves_a_load_that_comes_and_goes() -> None:
    """Two kinds of steps in turns of four need two maps, and neither one alone does."""
    begin = ExpertMap.even(4, 2)
    one, two = [6, 6, 1, 1], [6, 1, 6, 1]
    trace = ([one] * 4 + [two] * 4) * 4
    pool = find_pool(begin, trace, 4)
    assert len(pool) <= 4
    assert largest_load(migrate(begin, pool, one), one) == 7
    assert largest_load(migrate(begin, pool, two), two) == 7
    assert find_pool(begin, [[1, 1, 1, 1]] * 8, 4) == []
