"""A rank hangs at a random action or in a hook: the job ends in time and names that rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.campaign import Campaign, Figure, Record, limit, percentile
from tests.parity.hanging import TIMEOUT_S, Fault, run_hanging

KINDS = ("stop", "spin", "lock", "lose")
HOOKS = ("", "", "", "before_step", "after_step", "after_validation", "before_save")
"""Hooks in which a rank hangs; "": at an action of its program, as it always is for a lost
message."""
LONGEST_ACTION = 1 << 16
LAYOUTS = {
    "pp 2 x tp 2": {"parallel.pp": "2", "parallel.tp": "2"},
    "dp 2 x pp 2, ZeRO-2": {"parallel.pp": "2", "optimizer.zero": "2"},
    "pp 4, zb_h1": {"parallel.pp": "4", "pipeline.schedule": "zb_h1", "model.layers": "4"},
    "dp 2 x tp 2, sequence parallel": {
        "parallel.tp": "2",
        "parallel.sequence_parallel": "true",
    },
}
RANKS = 4
LEAVE_S = 5.0
LATE_S = 1.0


@dataclass(frozen=True)
class Hang:
    """A fault in a layout."""

    layout: str
    fault: Fault

    def __str__(self) -> str:
        fault = self.fault
        where = fault.hook or f"action {fault.action}"
        return f"{self.layout}: rank {fault.rank}: {fault.kind} at {where} of step {fault.step}"


class Hangs(Campaign[Hang]):
    name = "hangs"
    full = 50

    def draw(self, number: int, rng: random.Random) -> Hang:
        kind = KINDS[number % len(KINDS)]
        layouts = [name for name in LAYOUTS if kind != "lose" or "pp" in name]
        layout = rng.choice(layouts)
        hook = "" if kind == "lose" else rng.choice(HOOKS)
        step = 3 if hook in ("after_validation", "before_save") else rng.randint(1, 6)
        action = rng.randrange(LONGEST_ACTION)
        return Hang(layout, Fault(rng.randrange(RANKS), kind, step, action, hook))

    def run(self, trial: Hang, folder: Path) -> Record:
        hang = run_hanging(folder, RANKS, trial.fault, **LAYOUTS[trial.layout])
        hang.outcome.assert_one_line(4, "the job hangs: ")
        assert hang.culprit == trial.fault.rank, hang.outcome.errors[0]
        assert hang.noticed is not None
        return {"seconds": hang.seconds, "noticed": hang.noticed}

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        late = percentile([record["seconds"] for record in records], 95)
        return [
            Figure("ranks that hang, named rightly", f"{len(records)}"),
            limit(
                f"seconds from the fault to the end of the job, 95th percentile, "
                f"with parallel.timeout_s={TIMEOUT_S}",
                late,
                TIMEOUT_S + LEAVE_S,
                " s",
            ),
            limit(
                "seconds from the fault to the monitor's notice of it, at most",
                max(record["noticed"] for record in records),
                TIMEOUT_S + LATE_S,
                " s",
            ),
        ]
