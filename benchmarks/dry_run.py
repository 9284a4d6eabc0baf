"""The cost of a plan: ``python benchmarks/dry_run.py``.

``train.py CONFIG --dry-run`` runs for every file of ``configs/``, each in a new process: cold, with
an empty cache, so that its stages run without values, and warm, when what they do is read from the
cache. The slowest preset is compared with the limits of plans, and with new interpreters that
import torch, which a cold plan needs, or only load the command.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import Result, parser, report
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
QUICK = ROOT / "configs" / "quickstart.yaml"
LOADING = "import megapipe.train.job"
TORCH = "import torch"


class Times(NamedTuple):
    """Seconds of a preset's plan."""

    name: str
    cold: float
    warm: float


def environment(cache: Path | None) -> dict[str, str]:
    """Return the variables of a process with its own cache; None: the user's."""
    return {**os.environ, **({} if cache is None else {"XDG_CACHE_HOME": str(cache)})}


def seconds(*command: str, cache: Path | None = None) -> float:
    """Time a command in a new interpreter."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=environment(cache),
    )
    return time.perf_counter() - began


def timed(config: Path, rounds: int) -> Times:
    """Time a plan that finds the cache empty, and take the median of `rounds` that find it full."""
    plan = "train.py", str(config), "--dry-run"
    with tempfile.TemporaryDirectory() as name:
        cold, *warm = (seconds(*plan, cache=Path(name)) for _ in range(1 + rounds))
    return Times(config.stem, cold, statistics.median(warm))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    rounds = 1 if given.quick else 3
    configs = [QUICK] if given.quick else CONFIGS
    loading, torch = (
        statistics.median(
            [seconds("-c", each) for _ in range(1 + rounds)][1:]
        )  # the first compiles
        for each in (LOADING, TORCH)
    )
    every = [timed(config, rounds) for config in configs]
    table = Table(title="Seconds of a dry run", title_justify="left")
    table.add_column("preset")
    for heading in ("cold", "warm"):
        table.add_column(heading, justify="right")
    for each in sorted(every, key=lambda each: -each.cold):
        table.add_row(each.name, f"{each.cold:.2f}", f"{each.warm:.2f}")
    Console().print(table)
    results = []
    for what, limit, peer, own in (
        ("cold", 3.0, "importing torch", torch),
        ("warm", 0.5, "loading the command", loading),
    ):
        slowest = max(every, key=lambda each: float(getattr(each, what)))
        value, middle = (
            float(each)
            for each in (
                getattr(slowest, what),
                statistics.median(getattr(each, what) for each in every),
            )
        )
        text = f"{peer}, {own:.2f} s"
        claim = f"slowest plan of a preset, {what}: {slowest.name}"
        results.append(Result(claim, value, limit, "s", text))
        results.append(Result(f"{claim} / {peer}", value / own, 2.3, "x", text))
        results.append(Result(f"median plan of a preset, {what}", middle / own, 2.3, "x", text))
    report("Plans", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
