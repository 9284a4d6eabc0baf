"""A run with dropout is resumed at every step: it goes on bitwise as if it had not stopped."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.runs import LAYOUTS
from tests.parity.stopped_runs import (
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
)

STEPS = 20
GIVEN = {"train.steps": str(STEPS), "train.validate_every": str(STEPS), "model.dropout": "0.1"}
GIVEN |= {"log.every": str(STEPS)}


@dataclass(frozen=True)
class Resume:
    layout: str
    step: int

    def __str__(self) -> str:
        return f"{self.layout}: resumed at step {self.step} of {STEPS}"


class Resumes(Campaign[Resume]):
    name = "resumes"
    full = len(LAYOUTS) * (STEPS - 1)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes: dict[str, list[dict[str, Any]]] = {}

    def draw(self, number: int, rng: random.Random) -> Resume:
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        return Resume(layout, number // len(LAYOUTS) % (STEPS - 1) + 1)

    def run(self, trial: Resume, folder: Path) -> Record:
        layout, shared = LAYOUTS[trial.layout], self._shared(trial.layout)
        if trial.layout not in self._wholes:
            shared.mkdir(parents=True)
            every = {"checkpoint.every": "1", "checkpoint.keep": str(STEPS)}
            whole = Play("run", {**layout.settings, **GIVEN, **every})
            (self._wholes[trial.layout],) = run(shared, whole, world=layout.ranks)
        shutil.copytree(
            checkpoint(shared, "run", trial.step), checkpoint(folder, "run", trial.step)
        )
        (parts,) = run(folder, Play("run", {**layout.settings, **GIVEN}), world=layout.ranks)
        assert_continues(parts, self._wholes[trial.layout], steps=STEPS)
        assert parts[0]["first_step"] == trial.step
        assert_same_files(*(checkpoint(place, "run", STEPS) for place in (folder, shared)))
        batch = int(layout.settings.get("train.global_batch", "8"))
        given = set().union(*(rank.get("samples", ()) for rank in parts))
        assert given == set(range(batch * trial.step, batch * STEPS))
        return {"layout": trial.layout}

    def _shared(self, layout: str) -> Path:
        return self.folder / f"whole-{list(LAYOUTS).index(layout)}"

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        layouts = len({record["layout"] for record in records})
        what = f"steps of a {STEPS}-step run with dropout at which it was resumed, bitwise"
        return [Figure(what, f"{len(records)} in {layouts} layouts")]
