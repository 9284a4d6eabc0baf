"""A rank is killed by -9, at a random time or inside a phase of a save; the launcher goes on.

Every second trial is inside a save. In the background a save takes longer than the steps after it
wait, so a kill may cost an interval more there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record, limit, percentile
from tests.campaigns.phases import PHASES
from tests.campaigns.runs import EVERY, LAYOUTS, LIMIT_S, STEPS, Wholes
from tests.parity.jobs import Job

LONGEST_DELAY_S = 0.05
FOUR_RANKS_S = 10.0
"""The 95th percentile of seconds from a kill to the first step after it, at 4 ranks."""


@dataclass(frozen=True)
class Kill:
    layout: str
    rank: int
    step: int
    phase: str | None
    """Phase of a save; None: the kill comes after `delay` seconds of the step."""
    when: str = "before"
    call: int = 1
    delay: float = 0.0

    def __str__(self) -> str:
        place = f"{self.delay * 1000:.0f} ms into step {self.step}"
        if self.phase is not None:
            place = f"{self.when} call {self.call} of: {self.phase}, from step {self.step} on"
        return f"{self.layout}: rank {self.rank} {place}"

    @property
    def fault(self) -> dict[str, Any]:
        """The arguments of :func:`tests.campaigns.runs.plan`."""
        given: dict[str, Any] = {"rank": self.rank, "step": self.step}
        if self.phase is None:
            return {"fault": "tests.campaigns.signals:AtTime", "delay": self.delay, **given}
        given |= {"phase": self.phase, "when": self.when, "call": self.call}
        return {"fault": "tests.campaigns.phases:InPhase", **given}


class Kills(Campaign[Kill]):
    name = "kills"
    full = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")

    def draw(self, number: int, rng: random.Random) -> Kill:
        layout = list(LAYOUTS)[number // 2 % len(LAYOUTS)]
        ranks, given = LAYOUTS[layout]
        if number % 2:
            delay = rng.uniform(0, LONGEST_DELAY_S)
            return Kill(layout, rng.randrange(ranks), rng.randint(5, 10), None, delay=delay)
        behind = "checkpoint.async_save" in given
        names = [name for name, phase in PHASES.items() if behind or not phase.background]
        phase = PHASES[name := rng.choice(names)]
        rank = 0 if phase.lead else rng.randrange(ranks)
        call = rng.randint(1, phase.calls_of_first if rank == 0 else phase.calls)
        step = EVERY * rng.randint(3, 5)  # one save at least is over
        return Kill(layout, rank, step, name, rng.choice(("before", "after")), call)

    def run(self, trial: Kill, folder: Path) -> Record:
        ranks, given = LAYOUTS[trial.layout]
        whole = self._wholes.of(LAYOUTS[trial.layout])
        environ = runs.plan(folder, **trial.fault)
        with Job(folder, LIMIT_S) as job:
            args = runs.settings(self._wholes.shared, folder, given)
            runs.launched(job, ranks, environ, *args)
            while runs.struck(folder) is None and job.processes[0].poll() is None:
                time.sleep(0.02)
            struck = runs.struck(folder)
            assert struck is not None, f"nothing was killed:\n{job.text}"
            runs.assert_checkpoints(folder)
            outcome = job.end()
        assert outcome.codes == [0], outcome.text
        assert outcome.text.count("restarting") == 1, outcome.text
        runs.assert_checkpoints(folder)
        runs.assert_same_end(folder, whole)
        return {"ranks": ranks, "in a save": trial.phase is not None, **cost(folder, struck)}

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        inside = sum(record["in a save"] for record in records)
        behind = sum(record["background"] for record in records)
        least = 4 * len(records) // 10
        figures = [
            Figure("kill -9: all checkpoints intact, one to load, the end bitwise a whole run's",
                   f"{len(records)}"),
            Figure("of these inside a phase of a save; with saves in the background",
                   f"{inside}; {behind}", f">= {least} inside", inside >= least),
        ]  # fmt: skip
        for background, most in ((False, EVERY), (True, 2 * EVERY)):
            lost = [r["lost"] for r in records if r["background"] == background]
            if lost:
                what = "in the background" if background else "that training waits for"
                figures.append(limit(f"steps lost at most, saves {what}", max(lost), most))
        for ranks in sorted({record["ranks"] for record in records}):
            times = [r["seconds"] for r in records if r["ranks"] == ranks and r["seconds"]]
            if not times:
                continue
            words = f"seconds from a kill to the first step after it at {ranks} ranks"
            figures.append(Figure(f"{words}, median", f"{percentile(times, 50):.3g}"))
            late = percentile(times, 95)
            last = limit(f"{words}, 95th percentile", late, FOUR_RANKS_S)
            figures.append(last if ranks == 4 else last._replace(target="", met=True))
        return figures


def cost(folder: Path, struck: Record) -> dict[str, Any]:
    """Return the steps that were done again, and the seconds to the end of the first step after the
    kill."""
    notes = [note["text"] for note in runs.records(folder, "note")]
    behind = any("of which training waited" in text for text in notes)
    again = runs.resumed(folder, struck["time"])
    if again is None:  # all was saved: there was nothing to go on with
        assert struck["done"] == STEPS, "it has begun anew"
        return {"lost": 0, "seconds": None, "background": behind}
    step, since = again
    lost = struck["done"] - step
    assert 0 <= lost <= (2 if behind else 1) * EVERY, f"{lost} steps are lost"
    times = [record["time"] for record in runs.records(folder, "step")]
    first = min(time for time in times if time >= since)
    return {"lost": lost, "seconds": first - struck["time"], "background": behind}
