"""What the ranks of a campaign's job are: train.py with one fault, or with none.

As a script it is a rank that nobody starts again. The variable PLAN names a folder. Its `plan.json`
has the fault's class and arguments; as long as the file `armed` is there, the fault has not struck.
What it has done is written to `struck.json`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapipe.train import job
from megapipe.train.callbacks import Callback, Run, Step
from megapipe.train.main import main

PLAN = "MEGAPIPE_CAMPAIGN_PLAN"


class Fault(Callback):
    """Harm that is done once, from step `step` of rank `rank` on, by :meth:`arm`."""

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        self.folder, self.rank, self.step = folder, rank, step
        self.done = 0
        """Steps that have been done."""

    def begin(self, run: Run) -> None:
        self.done = run.first_step

    def before_step(self, run: Run, step: Step) -> None:
        if (run.mesh.rank, step.number) == (self.rank, self.step) and self.armed:
            self.arm(run)

    def after_step(self, run: Run, step: Step) -> None:
        self.done = step.number

    @property
    def armed(self) -> bool:
        """Whether it has not struck yet."""
        return (self.folder / "armed").exists()

    def arm(self, run: Run) -> None:
        """Prepare the harm, or do it."""
        raise NotImplementedError

    def struck(self) -> None:
        """Note that the harm is being done, so that it is done once."""
        text = json.dumps({"time": time.time(), "done": self.done})
        (self.folder / "new.json").write_text(text)
        os.replace(self.folder / "new.json", self.folder / "struck.json")
        (self.folder / "armed").unlink()


def planned(folder: Path) -> list[Callback]:
    """Return the fault that is planned in `folder`, if any."""
    plan = json.loads((folder / "plan.json").read_text())
    if not plan:
        return []
    module, _, name = plan.pop("fault").partition(":")
    return [getattr(importlib.import_module(module), name)(folder, **plan)]


if __name__ == "__main__":
    job.start = functools.partial(job.start, callbacks=planned(Path(os.environ[PLAN])))
    sys.exit(main(sys.argv[1:]))
