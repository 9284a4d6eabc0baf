"""Jobs of which some ranks are slow: they sleep longer in each operation, or get less processor."""

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
    """Each operation sleeps, for some time for each layer of the stage. That is so much longer, by
    a factor, on the `ranks`, in steps `first` to `last`; or these join a control `group`.

    With `steady` the clock of a rank stands still while the system lets another program run: it has
    the processor time of the rank, its sleep, and its waits for others, as long as they are.
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
    """What a job has told of its ranks."""

    outcome: Outcome
    steps: list[dict[str, Any]]
    """The records of its log."""

    @property
    def told(self) -> list[tuple[int, str, int]]:
        """Ranks, what they are, and since which step, in the order of its lines."""
        pattern = r" rank (\d+) \(pp .*\) is (a|still a|no) straggler.*? since step (\d+)"
        found = re.findall(pattern, self.outcome.text)
        return [(int(rank), what, int(step)) for rank, what, step in found]

    @property
    def scores(self) -> dict[int, tuple[int, float]]:
        """The rank with the largest score, and that, by the steps that end windows."""
        return {
            record["step"]: (record["slowest_rank"], record["slowest_score"])
            for record in self.steps
            if record["slowest_rank"] is not None
        }


def run_watched(
    folder: Path, world: int, slow: Slow, *, limit_s: float = 60.0, **settings: str
) -> Watched:
    """A job of `world` ranks, to its end."""
    script = folder / "slow_rank.py"
    script.write_text(SCRIPT.format(root=str(ROOT), slow=json.dumps(asdict(slow))))
    windows = {"log.stragglers_every": str(EVERY), "train.steps": str(STEPS)}
    given = arguments({**tiny(folder), **windows, **settings})
    outcome = run_forked(folder, world, *given, script=str(script), limit_s=limit_s)
    assert outcome.codes == [0] * world, outcome.text
    lines = map(json.loads, (folder / "runs/run/log.jsonl").read_text().splitlines())
    return Watched(outcome, [record for record in lines if record["kind"] == "step"])
