"""A learning rate that holds its run within a step, which a job's configuration names.

While the folder that the job was submitted from has a file `hold`, each rank stays in that step
until it is asked to stop. A file for each rank there tells that it has come so far.
"""

import os
import signal
import time
from pathlib import Path

STEP = 4


def rate(step: int, warmup_steps: float) -> float:
    if step == STEP:
        hold = Path("hold")
        Path(f"held.{os.environ['RANK']}").touch()
        request = getattr(signal.getsignal(signal.SIGUSR1), "__self__", None)
        while hold.exists() and not request:
            time.sleep(0.01)
    return 0.01 if step > warmup_steps else 0.005
