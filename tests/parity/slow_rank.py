"""Jobs of which ranks are slow: they sleep after each operation, or are stopped by turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.parity.jobs import ROOT, Outcome, arguments, tiny
from tests.parity.launches import run_forked

SCRIPT = """
import functools, json, random, sys, time
sys.path.insert(0, {root!r})
from megapipe.engine.stage import Stage
from megapipe.train import job
from megapipe.train.callbacks import Callback
from megapipe.train.main import main

slow = json.loads({slow!r})
draw = random.Random(5)
step = 0

class Steps(Callback):
    def before_step(self, run, now):
        global step
        step = now.number if run.mesh.rank in slow["ranks"] else 0

def slowed(call):
    @functools.wraps(call)
    def run(*args):
        began = time.perf_counter()
        result = call(*args)
        if step and slow["first"] <= step <= slow["last"]:
            factor = (slow["factor"] - 1) * draw.uniform(0.7, 1.3)
            time.sleep(factor * (time.perf_counter() - began))
        return result
    return run

for name in ("forward", "input_grad", "weight_grad"):
    setattr(Stage, name, slowed(getattr(Stage, name)))
job.start = functools.partial(job.start, callbacks=[Steps()])
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Slow:
    """These ranks take `factor` times as long for each operation of steps `first` to `last`."""

    ranks: tuple[int, ...] = ()
    factor: float = 2.5
    first: int = 1
    last: int = 1000


@dataclass(frozen=True)
class Watched:
    """What a job has told of its ranks."""

    outcome: Outcome
    steps: list[dict[str, Any]]
    """Records in its log."""

    @property
    def named(self) -> list[tuple[int, str, int]]:
        """Ranks that it tells of, what they are, and since which step, in the order of lines."""
        found = re.findall(
            r" rank (\d+) \(pp .* is (a|still a|no) straggler.*? since step (\d+)",
            self.outcome.text,
        )
        return [(int(rank), what, int(step)) for rank, what, step in found]


def run_watched(folder: Path, world: int, slow: Slow, settings: Mapping[str, str]) -> Watched:
    """A job of `world` ranks, to its end."""
    folder.mkdir(exist_ok=True)
    script = folder / "slow_rank.py"
    script.write_text(SCRIPT.format(root=str(ROOT), slow=json.dumps(asdict(slow))))
    of_all = {"model.hidden": "64", "train.sequence_length": "64", "train.steps": "37"}
    given = {**tiny(folder), **of_all, "log.stragglers_every": "8", **settings}
    outcome = run_forked(folder, world, *arguments(given), script=str(script))
    assert outcome.codes == [0] * world, outcome.text
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    return Watched(outcome, records)
