"""Jobs with one rank that hangs: at an action of its program, or in a hook of the loop."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.parity.jobs import ENDLESS, Job, Outcome, arguments, free_port, tiny
from tests.parity.launch_with import launched_with

TIMEOUT_S = 6
CALLBACKS = """
import ctypes, itertools, json, os, signal, time
from pathlib import Path
from megapipe.engine import channels
from megapipe.engine.executor import Executor
from megapipe.train.callbacks import Callback
from megapipe.watch.journal import STEP

if "TEST_NODE" in os.environ:
    from megapipe.watch import rank
    rank.machine = lambda: os.environ["TEST_NODE"]
fault = json.loads({fault!r})
mark = Path({mark!r})
here = int(os.environ["RANK"]) == fault["rank"] and mark.exists()
lost = []

def hang():
    global here
    here = False
    mark.unlink()
    os.write(1, f"the fault is at {{time.time()}}\\n".encode())  # ranks do not write into it
    if fault["kind"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault["kind"] == "spin":
        while True:
            pass
    elif fault["kind"] == "die":
        if os.fork() == 0:  # keeps the connections open
            time.sleep(fault["seconds"])
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["kind"] == "lock":
        mute, _ = os.pipe()
        # which the signal for stacks does not end
        ctypes.PyDLL(None).read(mute, ctypes.create_string_buffer(1), 1)
    else:
        lost.append(True)

class Sent:
    def wait(self, timeout=None):
        pass

send = channels._Outgoing.send
def send_or_lose(self, message, tensor):
    if lost:
        lost.clear()
        self.sent = self.line.count()
        self.in_flight.append((Sent(), tensor))
        self.unacknowledged += 1
    else:
        send(self, message, tensor)
channels._Outgoing.send = send_or_lose

run = Executor._run
def run_or_hang(self, *parts):
    calls = itertools.chain(*(self._parts[self._stepped][part] for part in parts))
    for index, (name, _, call) in enumerate(calls):
        due = self.train and self.journal.words[STEP] == fault["step"]
        if here and due and not fault["hook"] and index == fault["action"] % len(self._calls):
            hang()
        self.journal.set_activity(name)
        call()
Executor._run = run_or_hang

class Hook(Callback):
    def at(self, hook, step):
        if here and hook == fault["hook"] and step == fault["step"]:
            hang()
    def before_step(self, run, step):
        self.at("before_step", step.number)
    def after_step(self, run, step):
        self.at("after_step", step.number)
    def after_validation(self, run, record):
        self.at("after_validation", record.step)
    def before_save(self, run, step):
        self.at("before_save", step)

callbacks = [Hook()]
"""


@dataclass(frozen=True)
class Fault:
    """A hang of a rank: it is stopped by a signal (stop), runs for ever (spin) or holds Python's
    lock (lock), or its next message is lost (lose). Or it is killed (die), while a process that it
    has started keeps its connections open for `seconds`."""

    rank: int
    kind: str
    step: int = 3
    action: int = 0
    """Index in the program, from 0; ignored if there is a `hook`."""
    hook: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Hang:
    """How a job ended after a fault."""

    outcome: Outcome
    culprit: int | None
    """Rank that the job names."""
    seconds: float
    """Seconds from the fault to the end of the job."""
    noticed: float | None
    """Seconds from the fault until a monitor noticed it, by its own report."""


def write_callbacks(folder: Path, fault: Fault) -> Path:
    """Write a file of callbacks with a fault that occurs once."""
    mark = folder / "fault"
    mark.touch()
    path = folder / "hanging.py"
    path.write_text(CALLBACKS.format(mark=str(mark), fault=json.dumps(asdict(fault))))
    return path


def run_hanging(
    folder: Path, world: int, fault: Fault, *options: str, nodes: int = 1, **settings: str
) -> Hang:
    """Run a job to its end, launched with `options` on `nodes` nodes of `world` ranks each; the
    fault occurs once."""
    callbacks = write_callbacks(folder, fault)
    given = {**tiny(folder), **ENDLESS, "parallel.timeout_s": str(TIMEOUT_S)}
    given |= {"train.validate_every": "3", "checkpoint.every": "3", **settings}
    port = free_port()
    meet = ["--nnodes", str(nodes), "--rdzv-id", "a", "--rdzv-endpoint", f"localhost:{port}"]
    launch = ["--nproc", str(world), *(meet if nodes > 1 else []), *options, "train.py"]
    command = launched_with(callbacks, *launch, *arguments(given))
    with Job(folder) as job:
        for node in range(nodes):
            job.start(command, {"TEST_NODE": f"node{node}"})
            if node == 0 and nodes > 1:
                job.await_store(port)
        outcome = job.end()
        ended = time.time()
    at = re.search(r"the fault is at ([\d.]+)", outcome.text)
    assert at is not None, outcome.text
    named = re.search(r"the job hangs: rank (\d+)", outcome.text)
    reports = Path(given["run.folder"]).glob("run/hangs/*/rank-*[0-9].json")
    noticed = [json.loads(report.read_text())["noticed"] for report in reports]
    return Hang(
        outcome,
        int(named[1]) if named else None,
        seconds=ended - float(at[1]),
        noticed=min(noticed) - float(at[1]) if noticed else None,
    )
