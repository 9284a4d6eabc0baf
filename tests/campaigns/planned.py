"""Adds the fault that is planned to the runs of this process and of its forks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megapipe.train import job

PLAN = "MEGAPIPE_CAMPAIGN_PLAN"
"""The variable that names the folder of the plan."""


def add_fault() -> None:
    """Give each run that begins from now on the fault of the plan as a callback."""
    start = job.start

    def planned(*args: Any, **given: Any) -> int:
        from tests.campaigns.rank import callbacks  # loads torch

        return start(*args, callbacks=callbacks(Path(os.environ[PLAN])), **given)

    job.start = planned
