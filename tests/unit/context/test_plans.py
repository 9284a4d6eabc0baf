"""The plans of the field, and the proof that a plan is one."""

from __future__ import annotations

import pytest

from megapipe.context import plans
from megapipe.context.plan import Message, Pair, Plan, PlanError

EVERY = [
    *(plans.ring(n) for n in range(1, 10)),
    *(plans.double_ring(n, i) for n in range(2, 13) for i in range(1, n + 1) if n % i == 0),
    *(plans.teams(n, c) for n in (1, 2, 4, 8, 9, 12, 16) for c in (1, 2, 3, 4) if n % c**2 == 0),
]


def all_pairs(queries: int, keys: int) -> bool:
    return True


def causal(queries: int, keys: int) -> bool:
    return keys <= queries


@pytest.mark.parametrize("plan", EVERY, ids=lambda plan: f"{plan.name} {plan.ranks}")
def test_each_block_is_computed_once(plan: Plan) -> None:
    for each in (plan, plans.travelling_queries(plan)):
        each.prove(all_pairs)
        follow(each)


@pytest.mark.parametrize("n", range(1, 17))
def test_helpers(n: int) -> None:
    """With helpers, n // 2 + 1 rounds compute what takes a ring n rounds."""
    plan = plans.helpers(n)
    assert plan.length == n // 2 + 1
    plan.prove(causal)
    follow(plan)


def follow(plan: Plan) -> None:
    """Play a plan's messages: what is computed is there, and all results are returned."""
    for backward in (False, True):
        exchanges = plan.backward if backward else plan.forward
        here = {(kind, p, p): 0 for kind in ("queries", "keys") for p in range(plan.ranks)}
        found: dict[tuple[str, int, int], set[Pair]] = {
            (kind, p, owner): set()
            for kind in ("queries", "keys")
            for p in range(plan.ranks)
            for owner in range(plan.ranks)
        }
        coming: list[tuple[Message, set[Pair]]] = []
        for number in range(max(plan.length, len(exchanges))):
            for message in exchanges[number] if number < len(exchanges) else ():
                at = message.kind, message.source, message.owner
                if message.what == "bundle":
                    assert here[at] <= number, "it hands on what has not come"
                    here[message.kind, message.target, message.owner] = message.due
                    assert message.due > number
                else:
                    for late, pairs in coming:  # what this rank waits for before it adds
                        if (late.kind, late.target, late.owner) == at:
                            assert late.sent < number
                            found[at] |= pairs
                    coming.append((message, found[at]))
                    found[at] = set()
            if number < plan.length:
                for rank, pair in enumerate(plan.rounds[number]):
                    if pair is not None:
                        for kind, owner in zip(("queries", "keys"), pair, strict=True):
                            assert here[kind, rank, owner] <= number
                            found[kind, rank, owner].add(pair)
        returned_at_last = [(m.kind, m.owner, pairs) for m, pairs in coming if m.target == m.owner]
        computed = [pair for pairs in plan.rounds for pair in pairs if pair is not None]
        for kind in ("queries", "keys") if backward else ("queries",):
            for owner in range(plan.ranks):
                total = set(found[kind, owner, owner])
                for its_kind, its_owner, pairs in returned_at_last:
                    if (its_kind, its_owner) == (kind, owner):
                        assert not total & pairs, "a message returns to the owner twice"
                        total |= pairs
                index = 0 if kind == "queries" else 1
                assert total == {pair for pair in computed if pair[index] == owner}


@pytest.mark.parametrize(
    "plan",
    [*EVERY, *map(plans.helpers, range(1, 13))],
    ids=lambda plan: f"{plan.name} {plan.ranks}",
)
def test_bundles_that_a_rank_has(plan: Plan) -> None:
    """A bundle is there from when it is expected until it is used or sent on for the last time; the
    rank's own bundle is always there."""
    most = {"queries": 0, "keys": 0}
    for rank, part in enumerate(plan.forward_parts):
        begins = {
            (message.kind, message.owner): number
            for number, messages in enumerate(part.messages)
            for message in messages
            if (message.what, message.target) == ("bundle", rank)
        }
        for kind in ("queries", "keys"):
            for number in range(plan.length):
                others = [
                    bundle
                    for bundle, begin in begins.items()
                    if bundle[0] == kind and begin <= number <= part.needed[bundle]
                ]
                most[kind] = max(most[kind], 1 + len(others))
    assert plan.max_bundles == most


def sends(plan: Plan, what: str, kind: str, *, backward: bool = False) -> list[int]:
    """Count the messages of a kind that each rank sends."""
    exchanges = plan.backward if backward else plan.forward
    counts = [0] * plan.ranks
    for message in (each for exchange in exchanges for each in exchange):
        if (message.what, message.kind) == (what, kind):
            counts[message.source] += 1
    return counts


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_messages_of_a_ring(n: int) -> None:
    """Keys, and their gradients, take n - 1 hops; a rank never sends its local part to itself."""
    plan = plans.ring(n)
    assert sends(plan, "bundle", "keys") == [n - 1] * n
    assert sends(plan, "gradient", "keys", backward=True) == [n - 1] * n
    assert sends(plan, "partial", "queries") == [0] * n
    assert plan.max_bundles == {"queries": 1, "keys": min(n, 3)}
    turned = plans.travelling_queries(plan)
    assert sends(turned, "bundle", "queries", backward=True) == [n - 1] * n
    assert sends(turned, "gradient", "keys", backward=True) == [0] * n


@pytest.mark.parametrize(("n", "inner"), [(4, 2), (8, 2), (9, 3), (6, 3), (8, 4)])
def test_hops_of_a_double_ring(n: int, inner: int) -> None:
    """There are outer x (inner - 1) hops within a ring, and outer - 1 between rings."""
    outer = n // inner
    within, between = [0] * n, [0] * n
    for message in (each for exchange in plans.double_ring(n, inner).forward for each in exchange):
        same = message.source // inner == message.target // inner
        (within if same else between)[message.source] += 1
        if not same:
            assert message.sent == message.due - inner, "it has a whole cycle for the way"
    assert within == [outer * (inner - 1)] * n
    assert between == [outer - 1] * n


def test_messages_of_teams() -> None:
    """In teams of 2, 4 ranks send a query bundle, a result and a key bundle, not 3 key bundles."""
    plan = plans.teams(4, 2)
    assert sends(plan, "bundle", "queries") == [1] * 4
    assert sends(plan, "partial", "queries") == [1] * 4
    assert sends(plan, "bundle", "keys") == [1] * 4
    assert sends(plans.teams(8, 2), "bundle", "keys") == [3] * 8


def changed(plan: Plan, round_: int, rank: int, pair: Pair | None) -> Plan:
    rounds = [list(pairs) for pairs in plan.rounds]
    rounds[round_][rank] = pair
    return Plan("changed", tuple(map(tuple, rounds)))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (changed(plans.ring(4), 2, 3, None), "queries of 3 and keys of 1 meet 0 times"),
        (changed(plans.ring(4), 2, 1, (1, 0)), "queries of 1 and keys of 0 meet 2 times"),
        (changed(plans.ring(4), 2, 1, (1, 4)), "expected pairs of ranks 0 to 3"),
        (Plan("own", (((0, 0), (1, 1)), ((1, 0),))), "expected pairs of ranks 0 to 1"),
        (
            Plan(
                "own",
                (((0, 0), (1, 1), (2, 2)), (None, (1, 0), (2, 0)), (None, None, (2, 1))),
                {("keys", 0, 2): (0, "")},
            ),
            "rank 0 sends 2 bundles of keys at a time",
        ),
        (
            Plan(
                "own",
                (((0, 0), (1, 1), (2, 2)), (None, None, (2, 0)), (None, (1, 0), (2, 1))),
                {("keys", 1, 2): (1, "")},
            ),
            "rank 2 gets 2 bundles of keys at a time",
        ),
        (
            Plan("own", (((0, 0), (1, 0)), (None, (1, 1)))),
            "rank 0 does not have the keys of 0 in time for rank 1 in round 0",
        ),
    ],
)
def test_what_is_no_plan(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan.prove(causal)
