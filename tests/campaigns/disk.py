"""A disk that is full, has a bad place, or has become read-only, at each operation of a save.

Faults are raised where the operations are called. Where a small disk in memory can be mounted it is
filled up too, and the operations then fail by themselves.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns import runs
from tests.campaigns.bad_disk import ALL, FULL
from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.runs import BEHIND, STEPS, Layout, Wholes
from tests.parity.jobs import Outcome

LAYOUTS = {
    "waits": Layout(2, {"parallel.pp": "2"}),
    "in the background": Layout(2, {"parallel.pp": "2", **BEHIND}),
}
GIVEN = {"checkpoint.every": "4", "checkpoint.keep": "9"}
STEP = 8
"""Step of the save that fails; one save comes before it, and one after."""
FAULTS = ("ENOSPC", "EIO", "EROFS", FULL)


@dataclass(frozen=True)
class Failure:
    layout: str
    rank: int
    at: int
    operation: str
    fault: str

    def __str__(self) -> str:
        save = f"a save that {self.layout}" if self.layout == "waits" else f"a save {self.layout}"
        return f"{self.fault} at operation {self.at} ({self.operation}) of rank {self.rank}, {save}"


class Disks(Campaign[Failure]):
    name = "disk"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")
        self._mounts = can_mount(folder)
        self._operations: dict[str, list[list[str]]] = {}
        """Operations of the save, by layout and rank."""

    @property
    def full(self) -> int:  # type: ignore[override]
        return len(self._places()) * len(self._faults)

    @property
    def _faults(self) -> tuple[str, ...]:
        return FAULTS if self._mounts else FAULTS[:-1]

    def _places(self) -> list[tuple[str, int, int, str]]:
        """Return each operation of each rank in a save of each layout."""
        for layout in LAYOUTS if not self._operations else ():
            self._operations[layout] = self._count(layout)
        return [
            (layout, rank, at, name)
            for layout, ranks in self._operations.items()
            for rank, names in enumerate(ranks)
            for at, name in enumerate(names)
        ]

    def _count(self, layout: str) -> list[list[str]]:
        folder = self.folder / f"count-{layout}"
        folder.mkdir(parents=True)
        outcome = self._start(folder, Failure(layout, ALL, 0, "", ""), new=True)
        assert set(outcome.codes) == {0}, outcome.text
        paths = [folder / f"operations-{rank}" for rank in range(LAYOUTS[layout].ranks)]
        return [json.loads(path.read_text()) for path in paths]

    def draw(self, number: int, rng: random.Random) -> Failure:
        places, faults = self._places(), self._faults
        order = list(range(len(places) * len(faults)))
        random.Random(len(order)).shuffle(order)
        place, fault = divmod(order[number % len(order)], len(faults))
        return Failure(*places[place], faults[fault])

    def run(self, trial: Failure, folder: Path) -> Record:
        if trial.fault != FULL:
            return self._run(trial, folder)
        with mounted(folder / "disk"):
            return self._run(trial, folder)

    def _run(self, trial: Failure, folder: Path) -> Record:
        outcome = self._start(folder, trial, new=True)
        assert runs.struck(folder) is not None, outcome.text
        is_harmless = trial.fault == FULL and set(outcome.codes) == {0}  # an fsync, an unlink
        if not is_harmless:
            outcome.assert_one_line(5)
        place = folder / "disk" if trial.fault == FULL else folder
        saved = runs.assert_checkpoints(place)
        assert {4} <= set(saved) <= {4, STEP, STEPS}, saved
        (folder / "disk/filler").unlink(missing_ok=True)
        again = self._start(folder, trial, new=False)
        assert set(again.codes) == {0}, again.text
        runs.assert_same_end(place, self._wholes.of(LAYOUTS[trial.layout], **GIVEN))
        return {"fault": trial.fault, "operation": trial.operation, "harmless": is_harmless}

    def _start(self, folder: Path, trial: Failure, *, new: bool) -> Outcome:
        """Run the trial's job to its end; with the fault if the job is `new`."""
        fault = {"fault": "tests.campaigns.bad_disk:BadDisk", "rank": trial.rank, "step": STEP}
        fault |= {"at": trial.at, "error": trial.fault}
        environ = runs.plan(folder, **(fault if new else {}))
        place = folder / "disk" if trial.fault == FULL else folder
        ranks, given = LAYOUTS[trial.layout]
        args = runs.settings(self._wholes.shared, place, {**given, **GIVEN})
        return runs.forked(folder, ranks, environ, *args)

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        words = {"ENOSPC": "no space", "EIO": "a bad place", "EROFS": "read-only"}
        words[FULL] = "a disk that is filled up"
        harmless = sum(record["harmless"] for record in records)
        counts = ", ".join(
            f"{text} {sum(record['fault'] == fault for record in records)}"
            for fault, text in words.items()
        )
        return [
            Figure("faults of the disk at operations of a save: one line, code 5, an older "
                   "checkpoint, nothing half-written later",
                   f"{len(records) - harmless}: {counts}"),
            Figure("of these without effect, as the operation takes no room", f"{harmless}"),
        ]  # fmt: skip


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a disk in memory."""
    try:
        with mounted(folder / "mount"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Make `folder`, and mount a disk of 8 MiB in memory there until the block ends."""
    folder.mkdir(parents=True)
    disk = ["mount", "-t", "tmpfs", "-o", "size=8m", "megapipe-campaign", str(folder)]
    subprocess.run(disk, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)
