"""The cost of checking that weights and states are finite: ``python benchmarks/finite.py``.

A run trains a small GPT in one process with one thread, by the command of users. After each update
every master weight and every state is checked (:meth:`StateStore.windows` of
:mod:`megapipe.optim.state_store`). The processor time of that is compared with that of the same
step. The claim has the median of these shares, so that other load on the machine counts little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Result, parser, report

ROOT = Path(__file__).resolve().parents[1]
MOST = 1.0
"""Target, in percent of a step."""
WARM_UP = 3
"""Steps that do not count."""
SCRIPT = """
import functools, json, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from megapipe.optim import state_store
from megapipe.train import job
from megapipe.train.callbacks import Callback
from megapipe.train.main import main

class Clock(Callback):
    def __init__(self):
        self.shares = []

    def before_step(self, run, step):
        self.looking, self.began = 0.0, time.process_time()

    def after_step(self, run, step):
        self.shares.append(self.looking / (time.process_time() - self.began))

    def end(self, run):
        Path({out!r}).write_text(json.dumps(self.shares))

clock = Clock()
look = state_store.zero_if_finite

def timed(values):
    began = time.process_time()
    found = look(values)
    clock.looking += time.process_time() - began
    return found

state_store.zero_if_finite = timed
job.start = functools.partial(job.start, callbacks=[clock])
sys.exit(main(sys.argv[1:]))
"""


def shares(folder: Path, dtype: str, *, steps: int, quick: bool) -> list[float]:
    """Return the share of each step's processor time that its check of weights and states takes."""
    script, out = folder / "timed.py", folder / f"{dtype}.json"
    script.write_text(SCRIPT.format(root=str(ROOT), out=str(out)))
    settings = {
        "run.folder": folder,
        "run.name": dtype,
        "data.cache": folder / "cache",
        "model.dtype": dtype,
        "model.layers": 2 if quick else 6,
        "model.hidden": 32 if quick else 256,
        "train.sequence_length": 32 if quick else 512,
        "train.global_batch": 8,
        "train.steps": steps,
        "train.validation_samples": 8,
        "log.every": 1000,
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(
        [sys.executable, str(script), *given],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return list(json.loads(out.read_text()))[WARM_UP:]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=40, help="timed steps of each run (40)")
    given = options.parse_args(argv)
    if given.steps < 1:
        options.error("--steps must be at least 1")
    steps = WARM_UP + (2 if given.quick else given.steps)
    results = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for dtype in ("fp32", "bf16"):
            found = shares(Path(folder), dtype, steps=steps, quick=given.quick)
            claim = f"{dtype}: look whether weights and states are finite"
            share = 100 * statistics.median(found)
            results.append(Result(claim, share, MOST, "% of a step", "the step it belongs to"))
    report("Values that are not finite", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
