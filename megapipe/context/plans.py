"""Ring plans from publications: Ring Attention, LoongTrain, DistFlashAttn and WallFacer."""

from __future__ import annotations

from megapipe.context.plan import Kind, Plan


def ring(n: int) -> Plan:
    """Return the plan that passes keys and values around a ring in `n` rounds (Ring Attention,
    2310.01889; RSA, 2105.13120)."""
    return Plan("ring", tuple(tuple((p, (p - t) % n) for p in range(n)) for t in range(n)))


def double_ring(n: int, inner: int) -> Plan:
    """Return the plan that passes keys and values around rings of `inner` consecutive ranks.
    Meanwhile, in each ring the rank that got keys first also sends them to the next ring
    (LoongTrain, 2406.18485)."""
    outer = n // inner

    def rank(a: int, b: int) -> int:
        return a % outer * inner + b % inner

    rounds = tuple(
        tuple((p, rank(p // inner - c, p % inner - s)) for p in range(n))
        for c in range(outer)
        for s in range(inner)
    )
    sources: dict[tuple[Kind, int, int], tuple[int, str]] = {}
    for j in range(n):
        a, b = divmod(j, inner)
        for c in range(1, outer):
            sources["keys", j, rank(a + c, b)] = rank(a + c - 1, b), "outer"
    return Plan("double_ring", rounds, sources)


def helpers(n: int) -> Plan:
    """Return the plan in which ranks that the causal mask leaves idle compute for other ranks, with
    queries received from them (DistFlashAttn, 2310.03294). It has n // 2 + 1 rounds and is for
    contiguous positions."""

    def pair(t: int, p: int) -> tuple[int, int] | None:
        if p >= t:
            return p, p - t
        idle = 2 * t == n
        return None if idle else (p - t + n, p)

    return Plan("helpers", tuple(tuple(pair(t, p) for p in range(n)) for t in range(n // 2 + 1)))


def teams(n: int, team: int) -> Plan:
    """Return the plan for a grid of ranks with `team` ranks per row: queries are passed around
    within rows, keys within columns (WallFacer, 2407.00611)."""
    columns = n // team
    return Plan(
        "teams",
        tuple(
            tuple(
                (
                    p // team * team + (p - u) % team,
                    (p // team - v) % columns * team + p % team,
                )
                for p in range(n)
            )
            for v in range(columns)
            for u in range(team)
        ),
    )


def travelling_queries(plan: Plan) -> Plan:
    """Swap queries and keys in a plan, for a backward that sends queries instead of keys."""
    swapped: dict[Kind, Kind] = {"queries": "keys", "keys": "queries"}
    rounds = tuple(
        tuple(None if pair is None else (pair[1], pair[0]) for pair in pairs)
        for pairs in plan.rounds
    )
    sources = {
        (swapped[kind], owner, rank): source for (kind, owner, rank), source in plan.sources.items()
    }
    return Plan(f"{plan.name}, queries travel", rounds, sources)
