"""Jobs with some slow ranks: they sleep longer in each operation, or get less processor time."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.parity.jobs import ROOT, Outcome, arguments, tiny
from tests.parity.launches import run_forked

EVERY = 8
STEPS = 5 + 2 * EVERY
SCRIPT = """
import functools, json, os, random, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from megapipe.engine.stage import Stage
from megapipe.train import job
from megapipe.train.callbacks import Callback
from megapipe.train.main import main
from megapipe.watch.journal import CommCounter

slow = json.loads({slow!r})
draw = random.Random(5)
here = int(os.environ.get("RANK", 0)) in slow["ranks"]
step, slept, waited = 0, 0.0, 0.0

def clock():
    return time.thread_time() + slept + waited

wait = CommCounter.wait
def counted_wait(self, exchange, call, *given, **named):
    def counted():
        global waited
        began, used = time.perf_counter(), time.thread_time()
        result = call(*given, **named)
        waited += time.perf_counter() - began - (time.thread_time() - used)
        return result
    return wait(self, exchange, counted)

class Steps(Callback):
    def begin(self, run):
        if slow["steady"]:
            CommCounter.wait = counted_wait
            run.mesh.journal.own_time.stamp = clock
        if here and slow["group"]:
            Path(slow["group"], "cgroup.procs").write_text(str(os.getpid()))
    def before_step(self, run, now):
        global step
        step = now.number

def slowed(call):
    @functools.wraps(call)
    def run(stage, *given):
        global slept
        result = call(stage, *given)
        factor = slow["factor"] if here and slow["first"] <= step <= slow["last"] else 1
        layers = len(stage.module.layers)
        seconds = factor * layers * slow["layer_s"] * draw.uniform(0.9, 1.1)
        time.sleep(seconds)
        slept += seconds
        return result
    return run

for name in ("forward", "input_grad", "weight_grad"):
    setattr(Stage, name, slowed(getattr(Stage, name)))
job.start = functools.partial(job.start, callbacks=[Steps()])
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Slow:
    """A sleep in each operation, for a time per layer of the stage. It is longer by a factor on the
    `ranks`, in steps `first` to `last`; or these ranks join a control `group`.

    With `steady` the clock of a rank stands still while the system runs another program. It counts
    the rank's processor time, its sleep, and the full length of its waits for others.
    """

    ranks: tuple[int, ...] = ()
    factor: float = 10.0
    layer_s: float = 0.001
    first: int = 1
    last: int = 1000
    group: str = ""
    steady: bool = True


@dataclass(frozen=True)
class Watched:
    """What a job has reported of its ranks."""

    outcome: Outcome
    steps: list[dict[str, Any]]
    """Step records of its log."""

    @property
    def told(self) -> list[tuple[int, str, int]]:
        """Ranks, what is reported of them, and since which step, in the order of its lines."""
        pattern = r" rank (\d+) \(pp .*\) is (a|still a|no) straggler.*? since step (\d+)"
        found = re.findall(pattern, self.outcome.text)
        return [(int(rank), what, int(step)) for rank, what, step in found]

    @property
    def scores(self) -> dict[int, tuple[int, float]]:
        """The rank with the largest score, and that score, by the steps that end windows."""
        return {
            record["step"]: (record["straggler_rank"], record["straggler_score"])
            for record in self.steps
            if record["straggler_rank"] is not None
        }


def run_watched(
    folder: Path, world: int, slow: Slow, *, limit_s: float = 60.0, **settings: str
) -> Watched:
    """Run a job of `world` ranks to its end."""
    script = folder / "slow_rank.py"
    script.write_text(SCRIPT.format(root=str(ROOT), slow=json.dumps(asdict(slow))))
    windows = {"log.straggler_window": str(EVERY), "train.steps": str(STEPS)}
    given = arguments({**tiny(folder), **windows, **settings})
    outcome = run_forked(folder, world, *given, script=str(script), limit_s=limit_s)
    assert outcome.codes == [0] * world, outcome.text
    lines = map(json.loads, (folder / "runs/run/log.jsonl").read_text().splitlines())
    return Watched(outcome, [record for record in lines if record["kind"] == "step"])
