"""The search for a layout: ``python benchmarks/plan_search.py``.

``megapipe plan`` searches the layouts of large models, each in a new process: cold, with an empty
cache, and warm, when what it found is read from the cache. Then the plans of all layouts of a
smaller model are made (brute force), without bounds, for the fastest ten and for the time that
this takes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import Result, parser, report
from dry_run import ROOT, environment
from rich.console import Console
from rich.table import Table

from megapipe.cli import configured
from megapipe.errors import MegapipeError
from megapipe.plan.cache import Cache
from megapipe.plan.memory_fit import fits
from megapipe.plan.search.estimate import estimate
from megapipe.plan.search.search import Search, split_words

LLAMA_405B = (
    *("llama_70b", "model.layers=126", "model.hidden=16384", "model.heads=128"),
    *("model.ffn_hidden=53248", "train.global_batch=2048"),
)


class Case(NamedTuple):
    """A search, and the seconds that it may take."""

    words: Sequence[str]
    gpus: int
    cold: float
    warm: float


CASES: Mapping[str, Case] = {
    "llama_70b, 128 H100": Case(("llama_70b",), 128, 30, 5),
    "405B, 16,384 H100": Case(LLAMA_405B, 16_384, 60, math.inf),
    "mixtral_8x7b, 128 H100": Case(("mixtral_8x7b",), 128, math.inf, math.inf),
    "qwen3_30b_a3b, 64 H100": Case(("qwen3_30b_a3b",), 64, math.inf, math.inf),
}
TOY = Case(("quickstart", "parallel.ranks_per_node=2"), 2, math.inf, math.inf)
EVERY = Case(("llama_8b", "train.microbatch=1", "parallel.cp=1"), 32, math.inf, math.inf)
"""Search whose layouts are all planned."""


def searched(case: Case, cache: Path) -> tuple[float, list[dict[str, Any]]]:
    """Run the command in a new process; return its seconds and the ten fastest layouts."""
    command = [sys.executable, "-m", "megapipe", "plan", *case.words]
    command += ["--gpus", str(case.gpus), "--device", "H100", "--json"]
    began = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment(cache)
    )
    seconds = time.perf_counter() - began
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return seconds, found


def brute_force(case: Case, cache: Path) -> tuple[float, int, list[float]]:
    """Plan every layout; return the seconds, the number of layouts and the ten shortest steps."""
    words, free = split_words([*case.words, "plan.device=H100", f"plan.gpus={case.gpus}"])
    search = Search(configured(words), free, case.gpus, Cache([cache]))
    began, steps = time.perf_counter(), list[float]()
    choices = search.choices()
    for choice in choices:
        try:
            planned = estimate(choice, search.planner.units(choice), search.speeds)
        except MegapipeError:
            continue
        if fits(planned.bytes, search.speeds) is not False:
            steps.append(planned.seconds)
    return time.perf_counter() - began, len(choices), sorted(steps)[:10]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    cases = {"quickstart, 2 H100": TOY} if given.quick else CASES
    table = Table(title="Seconds of a search", title_justify="left")
    table.add_column("search")
    for heading in ("cold", "warm", "step s"):
        table.add_column(heading, justify="right")
    results = list[Result]()
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            cold, found = searched(case, Path(folder))
            warm, _ = searched(case, Path(folder))
        table.add_row(name, f"{cold:.1f}", f"{warm:.1f}", f"{found[0]['seconds']:.4g}")
        if case.cold < math.inf:
            results.append(Result(f"search of {name}, cold", cold, case.cold, "s", "limit"))
        if case.warm < math.inf:
            results.append(Result(f"search of {name}, warm", warm, case.warm, "s", "limit"))
    Console().print(table)
    case = TOY if given.quick else EVERY
    with tempfile.TemporaryDirectory() as folder:
        seconds, found = searched(case, Path(folder, "search"))
        all_seconds, number, steps = brute_force(case, Path(folder, "all"))
    equal = sum(a["seconds"] == b for a, b in zip(found, steps, strict=False))
    what = f"{number:,} layouts of {case.words[0]} on {case.gpus}"
    peer = f"plans of all, {all_seconds:.0f} s"
    results.append(
        Result(f"fastest ten of {what}", equal, len(steps), "equal", peer, at_least=True)
    )
    results.append(Result(f"search of {what}", seconds / all_seconds, 0.5, "x", peer))
    report("Search", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
