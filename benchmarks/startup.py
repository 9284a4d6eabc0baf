"""The cost of starting: ``python benchmarks/startup.py``.

Fresh interpreters import torch, and the trainer, which imports torch too. The least processor times
of several rounds are compared. ``tests/dist/test_startup.py`` says what must not be loaded.

Then a job of eight processes does one step of a toy, started by ``python -m megapipe.launch`` and
by torchrun: processor time and time of both, from the command to its end, in turns.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import Result, parser, report

TIMED = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
SIDES = ("torch", "megapipe.train.trainer")
ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {
    "megapipe.launch": ("-m", "megapipe.launch", "--nproc", "8"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"),
}
TOY = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "train.steps": 1,
    "train.sequence_length": 16,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.validation_samples": 8,
    "optimizer.warmup_steps": 0,
    "parallel.dp": 2,
    "parallel.tp": 2,
    "parallel.pp": 2,
}


class Cost(NamedTuple):
    """Cost of a command and all its processes, in seconds."""

    processor: float
    wall: float


def seconds(module: str) -> float:
    """Return the processor time of importing a module in a new interpreter."""
    run = [sys.executable, "-c", TIMED.format(module)]
    return float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def cost(launcher: str, folder: Path, name: str) -> Cost:
    """Return the cost of the toy job under a launcher."""
    files = {"run.folder": folder, "run.name": name, "data.cache": folder / "cache"}
    files["data.source"] = folder / "corpus.txt"
    own = [f"{key}={value}" for key, value in {**files, **TOY}.items()]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run = [sys.executable, *LAUNCHERS[launcher], "train.py", *own]
    subprocess.run(run, check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(used, time.perf_counter() - began)


def jobs(rounds: int) -> list[Result]:
    """Run the toy job under both launchers."""
    costs: dict[str, list[Cost]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("the cat sat on a mat and ran away " * 400)
        cost("megapipe.launch", folder, "prepares")
        for i in range(rounds):
            for side in LAUNCHERS if i % 2 else reversed(LAUNCHERS):
                costs[side].append(cost(side, folder, f"{side}-{i}"))
    ours, theirs = (
        Cost(*(statistics.median(column) for column in zip(*costs[side], strict=True)))
        for side in LAUNCHERS
    )
    return [
        Result(
            f"a job of 8 processes under megapipe.launch, {name}",
            mine / peer,
            0.5,
            "x",
            f"torchrun, {peer:.1f} s",
        )
        for name, mine, peer in (
            ("processor time", ours.processor, theirs.processor),
            ("time", ours.wall, theirs.wall),
        )
    ]


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
    results += jobs(1 if given.quick else 5)
    report("Start-up", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
