"""What starting costs: ``python benchmarks/startup.py``.

Fresh interpreters import torch, and the trainer, which imports torch too. Compared are the least
processor times of several rounds. What must not be loaded is in ``tests/unit/test_startup.py``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from common import Result, parser, report

TIMED = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
SIDES = ("torch", "megapipe.train.trainer")


def seconds(module: str) -> float:
    """Processor time of importing a module in a new interpreter."""
    run = [sys.executable, "-c", TIMED.format(module)]
    return float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    rounds = 1 if given.quick else 7
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for i in range(rounds):
        for side in SIDES if i % 2 else SIDES[::-1]:
            times[side].append(seconds(side))
    torch, ours = (min(times[side]) for side in SIDES)
    claim = "import megapipe.train.trainer, beyond torch"
    results = [Result(claim, ours - torch, 0.6, "s", f"import torch: {torch:.2f} s")]
    report("Start-up", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
