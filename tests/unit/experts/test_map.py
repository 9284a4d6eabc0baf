"""Who has which expert, and to whom rows go."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.row_routing import TokensPerExpert, destinations, evenly, tokens_per_rank


def drawn(seed: int) -> tuple[ExpertMap, TokensPerExpert, int]:
    """Draw a map with owners and replicas anywhere, rows, and the number of ranks of a node."""
    draw = random.Random(seed)
    ranks, each, slots = draw.randint(1, 6), draw.randint(1, 3), draw.randint(0, 3)
    owners = [rank for rank in range(ranks) for _ in range(each)]
    draw.shuffle(owners)
    replicas = []
    for rank in range(ranks):
        others = [e for e, owner in enumerate(owners) if owner != rank]
        replicas.append(draw.sample(others, min(len(others), draw.randint(0, slots))))
    found = ExpertMap(tuple(owners), ((),) * ranks, slots).with_replicas(replicas)
    counts = [[draw.randint(0, 9) for _ in owners] for _ in range(ranks)]
    return found, counts, draw.randint(1, ranks)


def test_rows_go_to_a_holder_as_near_as_there_is() -> None:
    """They go to the rank itself, else within its node, else anywhere; holders take turns."""
    assert destinations([2], 4, 4) == [2, 2, 2, 2]
    assert destinations([1, 2], 6, 6) == [1, 1, 2, 2, 1, 2], "ranks 0, 3, 4, 5 in turns"
    assert destinations([0, 5], 6, 2) == [0, 0, 0, 5, 5, 5], "ranks 2 and 3 have none on their node"
    assert destinations([0, 1, 2, 3], 4, 2) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_reaches_one_holder(seed: int) -> None:
    """One row after the other, by the rule in words; and loads are what has arrived."""
    found, counts, node = drawn(seed)
    arrived: Counter[int] = Counter()
    for expert, source in product(range(found.experts), range(found.ranks)):
        holders = found.holders(expert)
        goal = destinations(holders, found.ranks, node)[source]
        near = [holder for holder in holders if holder // node == source // node]
        assert goal in ([source] if source in holders else near or holders)
        arrived[goal] += counts[source][expert]
    own = tokens_per_rank(found, counts, node)
    assert own == [arrived[rank] for rank in range(found.ranks)]
    assert sum(own) == sum(map(sum, counts))


@pytest.mark.parametrize("seed", range(20))
def test_holders_take_equal_parts(seed: int) -> None:
    """No holder is dealt the rows of two ranks more than another holder."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 12)
    holders = sorted(draw.sample(range(ranks), draw.randint(1, ranks)))
    parts = Counter(destinations(holders, ranks, ranks))
    assert max(parts.values()) - min(parts.values()) <= 1
    assert parts.keys() == set(holders)


def test_a_run_begins_with_neighbours() -> None:
    assert ExpertMap.even(6, 3).owners == (0, 0, 1, 1, 2, 2)
    assert ExpertMap.even(6, 3).holders(3) == [1]


def test_rows_are_spread_over_their_sources() -> None:
    spread = evenly([7, 0, 3], 3)
    assert spread == [[3, 0, 1], [2, 0, 1], [2, 0, 1]]


@pytest.mark.parametrize("seed", range(10))
def test_maps_are_stored(seed: int) -> None:
    found, _, _ = drawn(seed)
    assert ExpertMap.stored(json.loads(json.dumps(found.plain()))) == found


@pytest.mark.parametrize(
    ("owners", "replicas", "slots", "words"),
    [
        ((0, 0, 1), ((), ()), 0, "3 experts cannot be split evenly over 2 ranks"),
        ((), ((),), 0, "0 experts cannot be split evenly over 1 rank"),
        ((0,), (), 0, "1 expert cannot be split evenly over 0 ranks"),
        ((0, 2), ((), ()), 0, "owner 2 of expert 1: expected a rank from 0 to 1"),
        ((0, -1), ((), ()), 0, "owner -1 of expert 1"),
        ((0, 0), ((), ()), 0, "rank 0 owns 2 experts: expected 1, as on every rank"),
        ((0, 1), ((1,), ()), 0, "rank 0 has 1 replicas: expected at most 0, its slots"),
        ((0, 1), ((0,), ()), 1, "rank 0 has a replica of expert 0, which it owns"),
        ((0, 1), ((2,), ()), 1, "replica of expert 2 on rank 0: expected one from 0 to 1"),
        ((0, 1), ((), (-1,)), 1, "replica of expert -1 on rank 1"),
        ((0, 1, 1, 0), ((2, 1), ()), 2, "replicas [2, 1] of rank 0: expected each once, in order"),
        ((0, 1, 1, 0), ((1, 1), ()), 2, "replicas [1, 1] of rank 0: expected each once, in order"),
    ],
)
def test_what_is_no_map(owners: Any, replicas: Any, slots: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ExpertMap(owners, replicas, slots)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"owners": [0], "replicas": [[]]},
        {"owners": [0], "replicas": [[]], "slots": 0, "more": 1},
        {"owners": [0.0], "replicas": [[]], "slots": 0},
        {"owners": [True], "replicas": [[]], "slots": 0},
        {"owners": [0], "replicas": [0], "slots": 0},
        {"owners": [0], "replicas": {}, "slots": 0},
        {"owners": [0], "replicas": [[]], "slots": None},
    ],
)
def test_what_is_not_stored_as_a_map(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'^expected \{"owners": \[\.\.\], "replicas"'):
        ExpertMap.stored(value)


@pytest.mark.parametrize("seed", range(10))
def test_places_follow_from_owners(seed: int) -> None:
    found, *_ = drawn(seed)
    each = found.experts // found.ranks
    listed = [expert for rank in range(found.ranks) for expert in found.owned(rank)]
    assert [listed[place] for place in found.positions()] == [*range(found.experts)]
    for rank in range(found.ranks):
        assert found.owned(rank) == sorted(found.owned(rank))
        assert [found.positions()[e] // each for e in found.owned(rank)] == [rank] * each
    assert ExpertMap.even(6, 3).positions() == [*range(6)]


@pytest.mark.parametrize("seed", range(20))
def test_filled_slots_have_copies_of_others(seed: int) -> None:
    found, _, _ = drawn(seed)
    others = found.experts - found.experts // found.ranks
    full = found.filled()
    assert full.owners == found.owners
    assert {len(replicas) for replicas in full.replicas} == {min(found.slots, others)}
    assert ExpertMap.even(4, 2, slots=1).filled().replicas == ((2,), (0,)), "those that come next"
