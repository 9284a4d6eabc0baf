"""A launcher whose ranks run train.py with callbacks, as forks like those of user jobs: ``python
tests/parity/launch_with.py FILE --nproc 2 train.py ...``.

FILE is a Python file that sets `callbacks` to a list. Each rank runs it once it has torch.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapipe.launch.launcher import main
from megapipe.train import job

ROOT = Path(__file__).resolve().parents[2]


def launched_with(file: Path, *arguments: str) -> list[str]:
    """Return Python's arguments that start the launcher of train.py with the callbacks of a
    file."""
    return [str(Path(__file__).relative_to(ROOT)), str(file), *arguments]


def add_callbacks(file: str) -> None:
    """Make runs of this process, and of its forks, execute FILE and use its callbacks."""
    start = job.start

    def start_with(*args: Any, **given: Any) -> int:
        return start(*args, callbacks=runpy.run_path(file)["callbacks"], **given)

    job.start = start_with


if __name__ == "__main__":
    add_callbacks(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
