"""The published plans, each a few lines."""

from __future__ import annotations

from megapipe.context.plan import Kind, Plan


def ring(n: int) -> Plan:
    """Keys go around (Ring Attention, 2310.01889; its exact form in 2105.13120): n rounds."""
    return Plan("ring", tuple(tuple((p, (p - t) % n) for p in range(n)) for t in range(n)))


def double_ring(n: int, inner: int) -> Plan:
    """Keys go around rings of `inner` neighbours, and once per cycle to the next ring, from where
    the cycle began, beside the cycle (LoongTrain, 2406.18485)."""
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
    """Ranks whose keys are all later compute for others, who send them their queries
    (DistFlashAttn, 2310.03294): n // 2 + 1 rounds, of contiguous blocks."""

    def pair(t: int, p: int) -> tuple[int, int] | None:
        if p >= t:
            return p, p - t
        idle = 2 * t == n
        return None if idle else (p - t + n, p)

    return Plan("helpers", tuple(tuple(pair(t, p) for p in range(n)) for t in range(n // 2 + 1)))


def teams(n: int, team: int) -> Plan:
    """Rows of `team` ranks share their queries, columns their keys (WallFacer, 2407.00611)."""
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
    """The plan with queries and keys exchanged, for a backward in which queries travel."""
    swapped: dict[Kind, Kind] = {"queries": "keys", "keys": "queries"}
    rounds = tuple(
        tuple(None if pair is None else (pair[1], pair[0]) for pair in pairs)
        for pairs in plan.rounds
    )
    sources = {
        (swapped[kind], home, rank): source for (kind, home, rank), source in plan.sources.items()
    }
    return Plan(f"{plan.name}, queries travel", rounds, sources)
