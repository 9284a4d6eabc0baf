"""A real SLURM on hosts of one machine, and jobs that scripts/slurm/train.sbatch runs there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Host, namespace
from tests.parity.jobs import ROOT, clean_environ

SCRIPT = str(ROOT / "scripts/slurm/train.sbatch")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")
DAEMONS = ("slurmctld", "slurmd")
CONFIGURATION = Path("/etc/slurm/slurm.conf")
CONTROL = "control"
NODES = [f"n{i}" for i in range(1, 7)]
"""A job takes whole nodes, so that three jobs of two nodes run at a time."""
ADDRESSES = {CONTROL: "10.77.0.1"} | {name: f"10.77.0.{i}" for i, name in enumerate(NODES, 11)}
"""Addresses in a network that ends at these hosts."""
LOST_S = 20
"""Seconds after which a silent node is lost."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
"""States in which a job stays."""
GRES_CONF = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
"""Files that stand for GPUs; nobody opens them."""
LOOK_S = 0.3
LIMIT_S = 180.0
"""Seconds that a wait may take: what takes longer hangs."""
SLURM_CONF = f"""
ClusterName=test
SlurmctldHost={CONTROL}({ADDRESSES[CONTROL]})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=FOLDER/state
SlurmdSpoolDir=FOLDER/%n
SlurmctldLogFile=FOLDER/slurmctld.log
SlurmdLogFile=FOLDER/slurmd.%n.log
SlurmctldPidFile=FOLDER/slurmctld.pid
SlurmdPidFile=FOLDER/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
SlurmdTimeout={LOST_S}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={",".join(NODES)} CPUs=64 Gres=gpu:2
PartitionName=DEFAULT Nodes=ALL
PartitionName=patient Default=YES PriorityTier=1 GraceTime=60
PartitionName=hasty PriorityTier=1 GraceTime=0
PartitionName=urgent PriorityTier=9 PreemptMode=OFF
"""
"""Partitions: a job of `urgent` ends one of `patient`, which has a minute to save, or of `hasty`,
at once."""


def why_not() -> str | None:
    """Return why there can be no cluster on this machine; None if there can be one."""
    if os.geteuid() != 0:
        return "a cluster needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"a cluster needs slurm-wlm, munge and iproute2: there is no {', '.join(missing)}"
    if CONFIGURATION.exists():
        return f"this machine has a SLURM of its own: {CONFIGURATION}"
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            name, pid = path.read_text().strip(), int(path.parent.name)
            if name in DAEMONS and namespace(pid) == namespace(os.getpid()):
                return f"this machine has a SLURM of its own: {name} runs"
    return None


class Cluster:
    """A controller, and nodes within it; raises OSError where the system makes no namespaces.

    `folder` has all that SLURM writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = Host(CONTROL)
        self.nodes: dict[str, Host] = {}

    def begin(self) -> None:
        """Start SLURM on all hosts, which alone see its files."""
        etc, munge = self.folder / "etc", self.folder / "run/munge"
        for folder in (etc / "slurm", munge, self.folder / "state"):
            folder.mkdir(parents=True)
        names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (etc / "resolv.conf").touch()  # no name server, for which a host would wait
        (etc / "slurm/slurm.conf").write_text(SLURM_CONF.replace("FOLDER", str(self.folder)))
        (etc / "slurm/gres.conf").write_text(GRES_CONF)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        for name in ("hosts", "resolv.conf", "slurm"):
            self.control.cover(f"/etc/{name}", etc / name)
        self.control.cover("/run", munge.parent)  # last, as resolv.conf may be a link to there
        self.control.make_network(ADDRESSES[CONTROL])
        files = ("key-file=key", "log-file=log", "pid-file=pid", "seed-file=seed")
        self.control.run("munged", *(f"--{file.replace('=', '=/run/munge/')}" for file in files))
        self.control.run("slurmctld", "-c")
        self.boot(*NODES)

    def boot(self, *names: str) -> None:
        """Start nodes, which were not there or have crashed, and wait until jobs can have them."""
        for name in names:
            self.nodes[name] = host = Host(name, self.control)
            self.control.plug_in(host, ADDRESSES[name])
            (self.folder / name).mkdir(exist_ok=True)
            host.run("slurmd", "-N", name)
        states = ("sinfo", "--noheader", "--Node", "--format=%T", f"--nodes={','.join(names)}")
        await_that(
            lambda: set(self.control.run(*states).split()) == {"idle"},
            lambda: self.control.run("sinfo", "--Node") + self.log,
        )

    @property
    def log(self) -> str:
        """Log of the controller."""
        return (self.folder / "slurmctld.log").read_text()

    def submit(self, folder: Path, *words: str) -> SlurmJob:
        """Submit a job from a folder: options of sbatch, a script and its arguments."""
        command = ("sbatch", "--parsable", *words)
        number = self.control.run(*command, folder=folder, environ=clean_environ())
        return SlurmJob(self, number.strip(), folder)

    def end(self) -> None:
        """End all hosts, and with them all that has run there."""
        self.control.end()


@dataclass(frozen=True)
class SlurmJob:
    """A job, or a task of an array, by the name that SLURM has for it."""

    cluster: Cluster
    number: str
    folder: Path
    """Folder from which the job was submitted."""
    name: str = "run"
    """Name of the job's run."""

    @property
    def run(self) -> Path:
        """Folder of the job's run."""
        return self.folder / "runs" / self.name

    def told(self, *keys: str) -> tuple[str, ...]:
        """Return the values of `keys` in SLURM's description of the job."""
        text = self.cluster.control.run("scontrol", "--oneliner", "show", "job", self.number)
        pairs = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return tuple(pairs[key] for key in keys)

    @property
    def end(self) -> tuple[str, ...]:
        """Job state, exit code with the signal that ended the job, and number of restarts."""
        return self.told("JobState", "ExitCode", "Restarts")

    @property
    def nodes(self) -> list[Host]:
        """Nodes of the job, the one of its script first."""
        words = ("scontrol", "show", "hostnames", *self.told("NodeList"))
        return [self.cluster.nodes[name] for name in self.cluster.control.run(*words).split()]

    @property
    def log(self) -> str:
        """Everything that the job has written."""
        (number,) = self.told("JobId")
        path = self.folder / f"megapipe-{number}.log"
        return path.read_text() if path.exists() else ""

    def await_end(self, restarts: int = 0) -> None:
        """Wait until the job has ended, or was restarted more often than `restarts`."""
        self._await(lambda state, _, count: state in ENDS or int(count) > restarts)

    def await_requeue(self, restarts: int) -> None:
        """Wait until the job has ended, or waits in the queue after `restarts` restarts."""
        queued = ("PENDING", str(restarts))
        self._await(lambda state, _, count: state in ENDS or (state, count) == queued)

    def await_files(self, *names: str) -> None:
        """Wait until the folder has these files."""
        self._await(lambda *_: all((self.folder / name).exists() for name in names))

    def cancel(self, *options: str) -> None:
        """Cancel the job, or with ``--signal`` send it a signal."""
        self.cluster.control.run("scancel", *options, self.number)

    def release(self) -> None:
        """Have a job that was submitted with ``--hold`` wait for its nodes."""
        self.cluster.control.run("scontrol", "release", self.number)

    def suspend(self, seconds: float) -> None:
        """Stop all processes of the job for some seconds."""
        self.cluster.control.run("scontrol", "suspend", self.number)
        self._await(lambda state, *_: state in ("SUSPENDED", *ENDS))
        time.sleep(seconds)
        self.cluster.control.run("scontrol", "resume", self.number)

    def begin_now(self) -> None:
        """Have a job that is queued again begin, which SLURM puts off for two minutes.

        In the second of its end, nodes take the new start for the old one and refuse it.
        """
        update = ("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")
        self.cluster.control.run(*update)

    def _await(self, holds: Callable[[str, str, str], bool]) -> None:
        """Wait until something holds for the job's `end`."""
        await_that(lambda: holds(*self.end), lambda: f"{self.end}\n{self.log}\n{self.cluster.log}")


def await_that(holds: Callable[[], object], otherwise: Callable[[], str]) -> None:
    """Wait until something holds; raises AssertionError with what is to be seen otherwise."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(LOOK_S)
