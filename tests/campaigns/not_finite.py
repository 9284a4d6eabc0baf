"""A value that is not finite, on one rank alone: it reaches no checkpoint, and the run ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.poison import KINDS
from tests.campaigns.runs import BEHIND, EVERY, STEPS, Layout, Wholes

DP, TP = {"parallel.dp": "2", "parallel.pp": "2"}, {"parallel.tp": "2", "parallel.pp": "2"}
LAYOUTS = {
    "dp2 pp2": Layout(4, DP),
    "dp2 pp2 zero 3, bf16, in the background": Layout(
        4, {**DP, "optimizer.zero": "3", "model.dtype": "bf16", **BEHIND}),
    "tp2 pp2 bf16": Layout(
        4, {**TP, "parallel.sequence_parallel": "true", "model.dtype": "bf16"}),
    "dp2 pp2 fp16": Layout(4, {**DP, "model.dtype": "fp16"}),
    "dp2 pp2 validated after the fact": Layout(4, {**DP, "optimizer.post_validation": "true"}),
}  # fmt: skip
VALUES = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Injection:
    layout: str
    rank: int
    step: int
    kind: str
    value: str
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.layout}: {self.value} into a {self.kind} of rank {self.rank}, step {self.step}"
        )


class NotFinite(Campaign[Injection]):
    name = "not_finite"
    full = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")

    def draw(self, number: int, rng: random.Random) -> Injection:
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        return Injection(
            layout,
            rng.randrange(LAYOUTS[layout].ranks),
            rng.randint(EVERY + 1, STEPS),
            KINDS[number // len(LAYOUTS) % len(KINDS)],
            rng.choice(VALUES),
            rng.randrange(1 << 30),
        )

    def run(self, trial: Injection, folder: Path) -> Record:
        ranks, given = LAYOUTS[trial.layout]
        environ = runs.plan(
            folder,
            "tests.campaigns.poison:Poison",
            rank=trial.rank,
            step=trial.step,
            kind=trial.kind,
            value=trial.value,
            seed=trial.seed,
        )
        args = runs.settings(self._wholes.shared, folder, given)
        outcome = runs.forked(folder, ranks, environ, *args)
        assert runs.struck(folder) is not None, outcome.text
        runs.assert_checkpoints(folder)
        if set(outcome.codes) != {0}:
            outcome.assert_one_line(6)
            return {"end": "exit code 6"}
        told = " ".join(note["text"] for note in runs.records(folder, "note"))
        if "is skipped" in told:
            return {"end": "the step skipped"}
        runs.assert_same_end(folder, self._wholes.of(LAYOUTS[trial.layout]))
        if "replayed" in told:
            return {"end": "the step computed again, the end bitwise that of a whole run"}
        return {"end": "overwritten before it was used, the end bitwise that of a whole run"}

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        ends = Counter(record["end"] for record in records)
        told = ", ".join(f"{end} {count}" for end, count in ends.most_common())
        what = "values that are not finite put into a run, none of which has reached a checkpoint"
        return [Figure(what, f"{len(records)}: {told}")]
