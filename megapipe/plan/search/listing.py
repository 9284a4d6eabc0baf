"""The layouts that megapipe plan prints: as a table, and as records of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from megapipe import text
from megapipe.plan.memory_fit import size_text
from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.objectives import Goal, Result

DAY_S = 24 * 3600.0
"""Seconds of a day."""
POLICY = "activations.policy"


class Budget(NamedTuple):
    """The tokens and the price of a device that a run is judged by."""

    tokens: float | None
    """Tokens of the run; None: those of the configuration."""
    price: float | None
    """Price of a device for an hour."""

    def days(self, result: Result, found: Estimate) -> float:
        """Return the days of the run, without saves and validation."""
        train = result.search.config.train
        tokens = self.tokens or train.samples * train.sequence_length
        return tokens / found.tokens_per_second / DAY_S

    def cost(self, result: Result, found: Estimate) -> float | None:
        """Return the price of the run."""
        hours = 24 * self.days(result, found) * result.search.gpus
        return None if self.price is None else hours * self.price


def table(listed: Sequence[tuple[Result, Estimate]], goal: Goal, budget: Budget) -> str:
    """Format layouts as a table with headings, the best first."""
    rows: list[dict[str, str]] = []
    for number, (result, each) in enumerate(listed, start=1):
        choice, shape, search = each.choice, each.choice.shape, result.search
        row = {"rank": str(number)}
        if len(goal.gpus) > 1 or goal.objective == "gpus":
            row["GPUs"] = f"{search.gpus:,}"
        if goal.objective == "sequence":
            row["sequence"] = f"{search.config.train.sequence_length:,}"
        row |= {
            "step s": f"{each.seconds:.4g}",
            "tokens/s/GPU": f"{each.tokens_per_second / search.gpus:,.0f}",
            "MFU": f"{each.mfu:.1%}",
            "memory": size_text(each.bytes),
            "bubble": f"{each.bubble:.1%}",
        }
        if budget.tokens is not None or budget.price is not None:
            row["days"] = f"{budget.days(result, each):.3g}"
        if (cost := budget.cost(result, each)) is not None:
            row["cost"] = f"{cost:,.0f}"
        chunks = f" x {choice.chunks}" if choice.chunks else ""
        row |= {
            "dp": str(choice.dp),
            "tp": str(shape.tp),
            "pp": str(choice.pp),
            "cp": str(shape.cp),
            "ep": str(shape.ep),
            "batch": str(shape.microbatch),
            "schedule": f"{choice.schedule}{chunks}",
            "recompute": _in_short(dict(choice.by_stage).get(POLICY, [shape.policy])),
            "ZeRO": str(choice.zero),
        }
        rows.append(row)
    return text.table([[*rows[0]], *([*row.values()] for row in rows)], left=0)


def _in_short(values: Sequence[str]) -> str:
    """Return values with the numbers of equal neighbours: full x 2, keep."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return ", ".join(f"{value} x {count}" if count > 1 else value for value, count in runs)


def record(result: Result, found: Estimate, budget: Budget) -> dict[str, Any]:
    """Return a layout as a JSON record, in seconds and bytes."""
    config = result.search.config
    return {
        "gpus": result.search.gpus,
        "keys": {"train.sequence_length": config.train.sequence_length, **found.choice.keys},
        **{name: value for name, value in found._asdict().items() if name != "choice"},
        "days": budget.days(result, found),
        "cost": budget.cost(result, found),
    }


def summary(result: Result, *, several: bool) -> str:
    """Describe how many layouts were looked at."""
    found = result.found
    devices = f"{result.search.gpus:,} devices: " if several else ""
    ended = "" if found.complete else "interrupted; so far: "
    return (
        f"{devices}{ended}{found.considered:,} layouts, {found.left_out:,} need too much memory or "
        f"are refused, {len(found.planned):,} planned in full"
    )
