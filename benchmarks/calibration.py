"""Steps that a calibrated plan predicts, against real ones: ``python benchmarks/calibration.py``.

Processes on the CPU train small models with their real kernels, as users start them: `megapipe
launch -m megapipe train`. `megapipe doctor --links` measures the links of two processes, and
`megapipe plan --calibrate` fits the factors of planned times to a few runs. Then other layouts of
one or two processes run, which the fit has not seen, and their steps are compared with their plans.

Each process computes with one thread; with more than two processes, ranks would share a core of a
small machine. All layouts run once in each round, so that a busy machine slows all of them. The
median step of all rounds counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from common import Result, parser, report

from megapipe.cli import parse
from megapipe.config.plan_file import plan_words
from megapipe.layout.resolve import resolve
from megapipe.plan.figures import plan_figures
from megapipe.plan.measured_run import WARM_UP
from megapipe.plan.measurements import BY_UNITS

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROUNDS = 10, 2
QUICK_STEPS = 4
MODEL = (
    *("model.layers=4", "model.hidden=256", "model.heads=4", "model.tied_embeddings=false"),
    *("model.norm=rmsnorm", "model.positions=rotary", "model.activation=swiglu"),
    *("model.bias=false", "train.sequence_length=128", "train.microbatch=2"),
    *("train.global_batch=8", "train.validate_every=0", "optimizer.warmup_steps=0"),
    *("data.validation_fraction=0", "plan.device=cpu"),
)
FITTED = {
    "1 process": "",
    "dp 2": "parallel.dp=2",
    "tp 2": "parallel.tp=2",
    "pp 2": "parallel.pp=2",
}
"""Layouts that the fit sees."""
OTHERS = {
    "micro-batch 1": "train.microbatch=1",
    "micro-batch 4, recomputed": "train.microbatch=4 activations.policy=full",
    "256 positions": "train.sequence_length=256",
    "hidden 384": "model.hidden=384 model.heads=6",
    "6 layers, batch 4": "model.layers=6 train.global_batch=4",
    "dp 2, micro-batch 4": "parallel.dp=2 train.microbatch=4",
    "dp 2, batch 16": "parallel.dp=2 train.global_batch=16",
    "tp 2, micro-batch 4": "parallel.tp=2 train.microbatch=4",
    "tp 2, 256 positions": "parallel.tp=2 train.sequence_length=256",
    "pp 2, zb_h1": "parallel.pp=2 pipeline.schedule=zb_h1",
    "pp 2, interleaved": "parallel.pp=2 pipeline.schedule=interleaved_1f1b pipeline.chunks=2",
    "pp 2, gpipe, batch 16": "parallel.pp=2 pipeline.schedule=gpipe train.global_batch=16",
}
"""Layouts that it does not see."""
MOST_OFF, TAU = 10.0, 0.8


def command(*words: str, processes: int = 1) -> str:
    """Run a command of megapipe, with one thread per process; return what it printed."""
    launch = ["-m", "megapipe.launch", "--nproc", str(processes), "-m", "megapipe"]
    call = [sys.executable, *(launch if processes > 1 else ["-m", "megapipe"]), *words]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, call, done.stdout, done.stderr)
    return done.stdout


def train(keys: str, folder: Path, steps: int) -> Path:
    """Train a layout in a new folder; return the run's folder."""
    recorded = list(range(WARM_UP + 1, steps + 1, 2))
    command(
        *("train", *MODEL, *keys.split(), f"train.steps={steps}", f"log.timeline={recorded}"),
        *(f"run.folder={folder.parent}", f"run.name={folder.name}"),
        processes=2 if "=2" in _mesh(keys) else 1,
    )
    return folder


def _mesh(keys: str) -> str:
    return " ".join(key for key in keys.split() if key.startswith("parallel."))


def steps_of(run: Path) -> list[float]:
    """Return the seconds of a run's steps, without the first ones."""
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if line["kind"] == "step" and line["step"] > WARM_UP]


def planned(keys: str, words: Iterable[str]) -> float:
    """Return the seconds of a step as `megapipe train --dry-run` plans it."""
    config = parse([*MODEL, *keys.split(), *words]).config
    time = plan_figures(*resolve(config, None, None, measure=BY_UNITS)).time
    assert time is not None
    return time.seconds


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation of the two values of `pairs`."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def compare(others: dict[str, str], steps: int, rounds: int, folder: Path) -> list[Result]:
    """Calibrate, and compare the steps of `others` with their plans."""
    links, factors = folder / "links.yaml", folder / "factors.yaml"
    command("doctor", "--links", str(links), processes=2)
    every = {**FITTED, **others}
    runs: dict[str, list[Path]] = {name: [] for name in every}
    for number in range(rounds):
        for name in list(every)[:: 1 if number % 2 == 0 else -1]:
            at = folder / f"{list(every).index(name)}-{number}"
            runs[name].append(train(every[name], at, steps))
    of_links = plan_words(links)
    fitted = [str(run) for name in FITTED for run in runs[name]]
    try:
        print(command("plan", *of_links, "--calibrate", *fitted, "-o", str(factors)))
        words = plan_words(factors)
    except subprocess.CalledProcessError as error:
        print(f"without factors, as there is no calibration: {error.stderr.strip()}")
        words = of_links
    pairs: dict[str, tuple[float, float]] = {}
    for name, keys in others.items():
        seconds = [each for run in runs[name] for each in steps_of(run)]
        pairs[name] = planned(keys, words), statistics.median(seconds)
        before = planned(keys, of_links)
        told = f"{1e3 * pairs[name][0]:6.1f} ms planned, {1e3 * pairs[name][1]:6.1f} measured"
        ratio = pairs[name][0] / pairs[name][1]
        least = f"least {1e3 * min(seconds):.1f}"
        uncalibrated = before / pairs[name][1]
        print(f"{name:26} {told} ({least}): {ratio:.3f}, without factors {uncalibrated:.3f}")
    errors = {name: 100 * abs(a / b - 1) for name, (a, b) in pairs.items()}
    worst = max(errors, key=lambda name: errors[name])
    claim = f"calibrated plans of {len(others)} other layouts"
    return [
        Result(f"{claim}: step off, most", errors[worst], MOST_OFF, "%", f"measured; {worst}"),
        Result(
            f"{claim}: step off, median",
            statistics.median(errors.values()),
            MOST_OFF,
            "%",
            "measured",
        ),
        Result(f"{claim}: tau", tau(list(pairs.values())), TAU, "", "measured", at_least=True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    few = dict(list(OTHERS.items())[:2])
    with tempfile.TemporaryDirectory() as folder:
        if given.quick:
            results = compare(few, QUICK_STEPS, 1, Path(folder))
        else:
            results = compare(OTHERS, STEPS, ROUNDS, Path(folder))
    report("Calibrated plans", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
