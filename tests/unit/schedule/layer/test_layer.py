"""Tasks of a layer with experts: when they run, and the order in which they are done first."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.moe_layer.search import (
    RULES,
    by_rule,
    fastest,
    training_order,
    with_reductions,
)
from megapipe.schedule.moe_layer.tasks import Resource, Step, Task, What, chunked
from megapipe.schedule.moe_layer.times import Order, by_priority, in_order

FLAT: tuple[tuple[What, Resource], ...] = (
    ("encode", "compute"),
    ("dispatch", "network"),
    ("decode", "compute"),
    ("experts", "compute"),
    ("combine", "network"),
)
TWO_HOPS: tuple[tuple[What, Resource], ...] = (
    ("dispatch", "node"),
    ("dispatch", "network"),
    ("experts", "compute"),
    ("combine", "network"),
    ("combine", "node"),
)


def drawn(shape: Sequence[tuple[What, Resource]], seed: int) -> list[Step]:
    """Draw steps of random lengths, some of them short."""
    numbers = random.Random(seed)
    lengths = (numbers.random() * numbers.choice((1.0, 0.2)) for _ in shape)
    return [Step(*each, seconds) for each, seconds in zip(shape, lengths, strict=True)]


def orders(tasks: Sequence[Task], *, chunks_in_order: bool = True) -> Iterator[Order]:
    """Yield every permutation of the tasks of each resource: all, or those in which the chunks of a
    step come one after the other, and the steps of a chunk."""
    steps: dict[Resource, dict[int, list[int]]] = {}
    each = len(tasks) // (1 + tasks[-1].chunk)
    for number, task in enumerate(tasks):
        steps.setdefault(task.resource, {}).setdefault(number % each, []).append(number)
    for lists in itertools.product(
        *(_merged(list(own.values()), chunks_in_order) for own in steps.values())
    ):
        yield dict(zip(steps, lists, strict=True))


def _merged(lists: list[list[int]], in_their_order: bool) -> list[list[int]]:
    if not in_their_order:
        return [list(each) for each in itertools.permutations(itertools.chain(*lists))]
    if not any(lists):
        return [[]]
    merged = []
    for place, own in enumerate(lists):
        if own and (not place or len(own) > len(lists[place - 1])):
            rest = [*lists[:place], own[1:], *lists[place + 1 :]]
            merged += [[own[0], *tail] for tail in _merged(rest, True)]
    return merged


def brute_force(tasks: Sequence[Task], *, chunks_in_order: bool = True) -> float:
    """Return the least time of all orders, but for those in which tasks wait for each other."""
    best = math.inf
    for order in orders(tasks, chunks_in_order=chunks_in_order):
        try:
            best = min(best, in_order(tasks, order).seconds)
        except ScheduleError:
            continue
    return best


def test_a_forward_in_two_chunks() -> None:
    """Computed by hand: rows of the second chunk are in flight while the first is computed."""
    steps = [
        Step("dispatch", "network", 4.0, latency=1.0),
        Step("experts", "compute", 6.0),
        Step("combine", "network", 4.0, latency=1.0),
    ]
    one = by_rule(chunked(steps, 1), "dispatch_first")
    assert (one.seconds, one.exposed) == (16.0, 10.0)
    two = by_rule(chunked(steps, 2), "dispatch_first")
    assert [slot[1:] for slot in two.slots] == [(0, 3), (3, 6), (6, 9), (3, 6), (6, 9), (9, 12)]
    assert (two.seconds, two.exposed) == (12.0, 6.0)


def test_both_links_at_once() -> None:
    """Two hops of a second each, in four chunks: five seconds and not eight."""
    steps = [Step("dispatch", "node", 4.0), Step("dispatch", "network", 4.0)]
    assert by_rule(chunked(steps, 4), "dispatch_first").seconds == 5.0
    flat = [Step("dispatch", "network", 4.0), Step("dispatch", "network", 4.0)]
    assert by_rule(chunked(flat, 4), "dispatch_first").seconds == 8.0


def test_rules_differ() -> None:
    """They do where one chunk could be combined and another dispatched."""
    steps = [
        Step("dispatch", "network", 3.0),
        Step("experts", "compute", 3.0),
        Step("combine", "network", 3.0),
    ]
    first = {rule: by_rule(chunked(steps, 3), rule).order["network"] for rule in RULES}
    assert first["dispatch_first"] == [0, 3, 6, 2, 5, 8]
    assert first["combine_first"] == [0, 3, 2, 5, 6, 8]


def test_in_turns() -> None:
    """Training takes turns: a chunk is in flight while one is computed; with two hops, two are."""
    flat = training_order(chunked(drawn(FLAT, 0), 4))
    names = [(task.what[0], task.chunk) for task in flat.tasks]
    link = [names[number] for number in flat.order["network"]]
    turns = ["d0", "d1", "c0", "d2", "c1", "d3", "c2", "c3"]
    assert [f"{what}{chunk}" for what, chunk in link] == turns
    device = [f"{names[number][0]}{names[number][1]}" for number in flat.order["compute"]]
    assert device == ["e0", "e1", "d0", "e0", "e2", "d1", "e1", "e3", "d2", "e2", "d3", "e3"]
    two = training_order(chunked(drawn(TWO_HOPS, 0), 3))
    names = [(task.what[0], task.chunk) for task in two.tasks]
    orders = {link: [names[n] for n in two.order[link]] for link in ("node", "network")}
    assert ["".join(map(str, each)) for each in orders["node"]] == [
        "d0",
        "d1",
        "d2",
        "c0",
        "c1",
        "c2",
    ]
    assert ["".join(map(str, each)) for each in orders["network"]] == [
        *("d0", "d1", "c0", "d2", "c1", "c2")
    ]


def test_what_arrives_at_once_is_computed_in_chunks() -> None:
    steps = [
        Step("dispatch", "network", 4.0, latency=1.0, at_once=True),
        Step("experts", "compute", 6.0),
        Step("combine", "network", 2.0),
    ]
    timed = training_order(chunked(steps, 2))
    assert [slot[1:] for slot in timed.slots] == [(0, 5), (5, 8), (8, 9), (8, 11), (11, 12)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [FLAT[1:], TWO_HOPS])
def test_no_order_of_four_chunks_is_faster(
    shape: Sequence[tuple[What, Resource]], seed: int
) -> None:
    """ScheMoE: what is found equals brute force over the permutations of all tasks."""
    tasks = chunked(drawn(shape, seed), 4)
    found = fastest(tasks)
    assert found.seconds == pytest.approx(brute_force(tasks), rel=1e-9)
    assert in_order(tasks, found.order).slots == found.slots


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 25))
@pytest.mark.parametrize("shape", [FLAT, TWO_HOPS])
def test_no_order_of_four_chunks_is_faster_at_other_lengths(
    shape: Sequence[tuple[What, Resource]], seed: int
) -> None:
    tasks = chunked(drawn(shape, seed), 4)
    assert fastest(tasks).seconds == pytest.approx(brute_force(tasks), rel=1e-9)


def test_a_search_finds_what_no_list_does() -> None:
    """There are lengths at which a link that waits, with a task ready, is through earlier."""
    better = 0
    for seed in range(30):
        tasks = chunked(drawn(TWO_HOPS, seed), 3)
        lists = [
            by_priority(tasks, lambda task, p=places: p.index(task.what)).seconds
            for places in itertools.permutations(("dispatch", "experts", "combine"))
        ]
        found = fastest(tasks).seconds
        assert found <= min(lists) * (1 + 1e-9)
        better += found < min(lists) * (1 - 1e-9)
    assert better > 0


def unordered(tasks: Sequence[Task]) -> list[Task]:
    """Let the chunks of a step come in any order."""
    return [
        task._replace(after=tuple(n for n in task.after if tasks[n].chunk == task.chunk))
        for task in tasks
    ]


def test_chunks_need_no_other_order_among_themselves() -> None:
    """They are alike, so those of a step may as well come one after the other, and each in the
    order of its steps: nothing else could run."""
    for seed in range(3):
        tasks = chunked(drawn(FLAT[1:], seed), 2)
        assert brute_force(unordered(tasks), chunks_in_order=False) == pytest.approx(
            brute_force(tasks)
        )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [FLAT[1:], TWO_HOPS])
def test_four_chunks_need_no_other_order_either(
    shape: Sequence[tuple[What, Resource]], seed: int
) -> None:
    """The search without that order finds none that is faster."""
    tasks = chunked(drawn(shape, seed), 4)
    assert fastest(unordered(tasks)).seconds == pytest.approx(brute_force(tasks), rel=1e-9)


@pytest.mark.parametrize("shape", [FLAT, TWO_HOPS])
def test_an_exchange_waits_for_one_piece_of_a_reduction_at_most(
    shape: Sequence[tuple[What, Resource]],
) -> None:
    """Lina: it may wait for longer where all is one bucket."""
    longer = 0
    for seed in range(20):
        numbers = random.Random(seed)
        timed = by_rule(chunked(drawn(shape, seed), numbers.randint(1, 4)), "dispatch_first")
        bucket, pieces = 2.0, numbers.randint(4, 20)
        piece = bucket / pieces
        in_pieces = with_reductions(timed, "network", [piece] * pieces)
        whole = with_reductions(timed, "network", [bucket])
        assert in_pieces.longest_wait <= piece * (1 + 1e-9)
        assert in_pieces.seconds <= whole.seconds * (1 + 1e-9)
        longer += whole.longest_wait > piece
        for each, count in ((in_pieces, pieces), (whole, 1)):
            assert sum(task.what == "reduce" for task in each.tasks) == count
            assert max(slot.end for slot in each.slots) >= bucket
    assert longer > 10


def test_reductions_elsewhere_are_not_waited_for() -> None:
    timed = by_rule(chunked(drawn(FLAT, 1), 2), "dispatch_first")
    assert with_reductions(timed, "network", [5.0]).longest_wait > 0
    aside = with_reductions(timed, "node", [5.0])
    assert (aside.longest_wait, aside.seconds) == (0.0, timed.seconds)


def test_orders_that_cannot_be() -> None:
    tasks = chunked(drawn(FLAT[1:], 0), 2)
    order = by_rule(tasks, "dispatch_first").order
    with pytest.raises(ScheduleError, match=r"order of network: \[0, 4, 3\] does not list"):
        in_order(tasks, {**order, "network": [0, 4, 3]})
    with pytest.raises(ScheduleError, match=r"order of node: \[0\] does not list each of \[\]"):
        in_order(tasks, {**order, "node": [0]})
    with pytest.raises(ScheduleError, match=r"tasks .* wait for each other in this order"):
        in_order(tasks, {**order, "network": [3, 0, 4, 7]})
