"""A signal asks a job to stop at a random time: it saves, and goes on later without a step lost."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record, percentile
from tests.campaigns.runs import LAYOUTS, LIMIT_S, STEPS, Wholes
from tests.parity.jobs import Job, Outcome

LONGEST_DELAY_S = 0.03
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SMALL = [name for name, layout in LAYOUTS.items() if layout.ranks <= 4]


@dataclass(frozen=True)
class Preemption:
    layout: str
    rank: int
    step: int
    delay: float
    number: signal.Signals
    to_launcher: bool

    def __str__(self) -> str:
        to = "the launcher" if self.to_launcher else f"rank {self.rank}"
        when = f"{self.delay * 1000:.0f} ms into step {self.step}"
        return f"{self.layout}: {self.number.name} to {to} {when}"


class Preemptions(Campaign[Preemption]):
    name = "preemptions"
    full = 30

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")

    def draw(self, number: int, rng: random.Random) -> Preemption:
        layout = SMALL[number % len(SMALL)]
        return Preemption(
            layout,
            rng.randrange(LAYOUTS[layout].ranks),
            rng.randint(2, STEPS - 4),
            rng.uniform(0, LONGEST_DELAY_S),
            SIGNALS[number // 2 % len(SIGNALS)],
            rng.random() < 0.5,
        )

    def run(self, trial: Preemption, folder: Path) -> Record:
        environ = runs.plan(
            folder,
            "tests.campaigns.signals:AtTime",
            rank=trial.rank,
            step=trial.step,
            delay=trial.delay,
            number=int(trial.number),
            to_launcher=trial.to_launcher,
        )
        stopped = self._start(trial, folder, environ)
        struck = runs.struck(folder)
        assert struck is not None, stopped.text
        stopped.assert_one_line(75, "stopped by a signal; saved step")
        last = max(runs.steps(folder))
        assert max(runs.assert_checkpoints(folder)) == last
        ended = runs.records(folder, "step")[-1]["time"]
        again = self._start(trial, folder, environ)
        assert again.codes == [0], again.text
        assert runs.resumed(folder) is not None
        numbers = [record["step"] for record in runs.records(folder, "step")]
        assert numbers == list(range(1, STEPS + 1)), "each step is done once"
        runs.assert_same_end(folder, self._wholes.of(LAYOUTS[trial.layout]))
        return {"seconds": max(0.0, ended - struck["time"])}

    def _start(self, trial: Preemption, folder: Path, environ: dict[str, str]) -> Outcome:
        ranks, given = LAYOUTS[trial.layout]
        with Job(folder, LIMIT_S) as job:
            args = runs.settings(self._wholes.shared, folder, given)
            runs.launched(job, ranks, environ, *args)
            return job.end()

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        late = percentile([record["seconds"] for record in records], 95)
        return [
            Figure("stopped by a signal with no step lost, the end bitwise that of a whole run",
                   f"{len(records)}"),
            Figure("seconds from the signal to the end of the last step, 95th percentile",
                   f"{late:.2g}"),
        ]  # fmt: skip
