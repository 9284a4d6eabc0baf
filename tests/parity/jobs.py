"""Real jobs for tests: train.py under torchrun, as several ranks without a launcher, or as one
process."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUR_FRAME = re.compile(rf'File "{re.escape(str(ROOT))}/megapipe/|/train\.py", line')
"""Matches a line of a traceback in the program, not in packages installed below its folder."""
HOW_IT_ENDED = re.compile(r"megapipe: (error:|stopped by|rank \d+ was interrupted)")
"""Matches beginnings of lines that say how a job ended."""
LIMIT_S = 120.0
"""Seconds after which a job counts as hanging."""
MARK = "MEGAPIPE_TEST_JOB"
LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PMIX?_|TORCHELASTIC_|GROUP_|ROLE_|TORCH_CPP_LOG)"
)
"""Matches variables of launchers, and the one that tests set for processes that fork."""


def write_corpus(path: Path, words: int = 4000) -> Path:
    """Write a text with some structure."""
    draw = random.Random(7)
    choice = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "away"]
    path.write_text(" ".join(draw.choice(choice) for _ in range(words)))
    return path


def tiny(folder: Path) -> dict[str, str]:
    """Return settings of a run that takes milliseconds per step, with all its files in `folder`."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    return {
        "run.folder": str(folder / "runs"),
        "data.source": str(corpus),
        "data.cache": str(folder / "cache"),
        "model.layers": "2",
        "model.hidden": "16",
        "model.heads": "2",
        "optimizer.warmup_steps": "1",
        "train.steps": "3",
        "train.sequence_length": "16",
        "train.global_batch": "4",
        "train.microbatch": "1",
        "train.validation_samples": "4",
        "parallel.timeout_s": "20",
    }


ENDLESS = {
    "train.steps": "1000000",
    "optimizer.schedule": "constant",
    "log.every": "100000",
}


def arguments(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def clean_environ() -> dict[str, str]:
    """Return this process's environment without what a launcher has set."""
    return {key: value for key, value in os.environ.items() if not LAUNCHERS.match(key)}


def free_port() -> int:
    """Return a port that nothing listens on, below the ports that the system gives to connections.

    Any program may get one of those before the job listens on it; a client that tries it in vain
    may even be connected to itself.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Outcome:
    """What a job left: all output, the exit codes of its processes, its duration."""

    text: str
    codes: list[int]
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Lines that say how it ended."""
        return [line for line in self.text.splitlines() if HOW_IT_ENDED.match(line)]

    def assert_one_line(self, code: int, *needles: str) -> None:
        """Assert one error line with these words, this exit code of every process, no traceback."""
        assert len(self.errors) == 1, self.text
        for needle in needles:
            assert needle in self.errors[0], self.errors[0]
        assert set(self.codes) == {code}, (self.codes, self.text)
        ours = [x for x in self.text.splitlines() if OUR_FRAME.search(x)]
        assert not ours, self.text
        assert self.seconds < LIMIT_S


class Job:
    """Processes that belong together; all are gone when the `with` block ends."""

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.folder = folder
        self.limit_s = limit_s
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        self.began = time.monotonic()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def start(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[bytes]:
        given = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self.mark}
        with self.output.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**clean_environ(), **given, **(environ or {})},
                **{
                    "cwd": ROOT,
                    "stdin": subprocess.DEVNULL,
                    "stdout": out,
                    "stderr": out,
                    **options,
                },
            )
        self.processes.append(process)
        return process

    @property
    def output(self) -> Path:
        return self.folder / f"{self.mark}.txt"

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def torchrun(self, world: int, *args: str) -> None:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        self.start([*run, "train.py", *args])

    def launch(self, world: int, *args: str) -> None:
        self.start(["-m", "megapipe.launch", "--nproc", str(world), "train.py", *args])

    def ranks(self, world: int, args: Mapping[int, Sequence[str]], port: int | None = None) -> None:
        """Start some ranks of a world of `world`, each with its own arguments, without a
        launcher."""
        common = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
        }
        for rank, own in args.items():
            self.start(["train.py", *own], {**common, "RANK": str(rank)})

    def kill_ranks(self, needle: str) -> None:
        """Kill the processes of this job's launcher, with -9, when the output has `needle`."""
        self.await_text(needle)
        for pid in self.pids().values():
            os.kill(pid, signal.SIGKILL)

    def await_text(self, needle: str, after: int = 0) -> None:
        """Wait until the output has `needle` after its first `after` characters."""
        while needle not in self.text[after:]:
            assert time.monotonic() < self.began + self.limit_s, self.text
            assert any(p.poll() is None for p in self.processes), self.text
            time.sleep(0.05)

    def await_store(self, port: int) -> None:
        """Wait until the store listens on the port: the first of several launchers hosts it."""
        while self.began + self.limit_s > time.monotonic():
            with contextlib.suppress(OSError):
                socket.create_connection(("localhost", port), timeout=1).close()
                return
            time.sleep(0.1)
        raise AssertionError(f"nobody listens at port {port}:\n{self.text}")

    def await_members(self, port: int, number: int) -> None:
        """Wait until `number` of its processes have a connection to the store at that port."""
        while sum(is_connected(process.pid, port) for process in self.processes) < number:
            assert time.monotonic() < self.began + self.limit_s, self.text
            time.sleep(0.05)

    def await_handlers(self) -> None:
        """Wait until all processes handle signals, which is before their slow imports."""
        while not all(heeds_signals(process.pid) for process in self.processes):
            assert time.monotonic() < self.began + self.limit_s, self.text
            time.sleep(0.01)

    def end(self, left_behind_s: float = 15.0) -> Outcome:
        """Wait for all processes; none may outlive the first by more than `left_behind_s`
        seconds."""
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.1, self.began + self.limit_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job does not end:\n{self.text}") from None
        seconds = time.monotonic() - self.began
        for _ in range(int(left_behind_s / 0.1)):
            if not (left := list(self.alive())):
                break
            time.sleep(0.1)
        assert not left, f"processes {left} are left behind"
        first = re.search(r"Root Cause.*?exitcode\s*: (-?\d+)", self.text, re.DOTALL)
        return Outcome(self.text, [int(first[1])] if first else codes, seconds)

    def pids(self) -> dict[int, int]:
        """Return the process of each rank that this job's launcher has started: a forked one has a
        name, a spawned one has RANK in its environment."""
        forked, spawned = dict[int, int](), dict[int, int]()
        for pid in self.alive():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("rank "):
                    forked[int(name.removeprefix("rank "))] = pid
                pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                spawned.update({int(p[5:]): pid for p in pairs if p.startswith(b"RANK=")})
        return forked or spawned

    def alive(self) -> Iterator[int]:
        """Yield the processes of this job, by its mark in their environment."""
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in environ.read_bytes():
                    yield int(environ.parent.name)


def heeds_signals(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1, as it has from the start of a run on."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def is_connected(pid: int, port: int) -> bool:
    """Whether the process has a TCP connection to that port of some host."""
    proc, inodes = Path(f"/proc/{pid}"), set[str]()
    for table in ("tcp", "tcp6"):
        for row in (proc / "net" / table).read_text().splitlines()[1:]:
            words = row.split()
            if words[2].endswith(f":{port:04X}") and words[3] == "01":  # established
                inodes.add(f"socket:[{words[9]}]")
    for descriptor in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(descriptor) in inodes:
                return True
    return False


def run_torchrun(folder: Path, world: int, *args: str) -> Outcome:
    with Job(folder) as job:
        job.torchrun(world, *args)
        return job.end()


def run_launched(folder: Path, world: int, *args: str, limit_s: float = LIMIT_S) -> Outcome:
    with Job(folder, limit_s) as job:
        job.launch(world, *args)
        return job.end()


def run_plain(folder: Path, *args: str) -> Outcome:
    with Job(folder) as job:
        job.start(["train.py", *args])
        return job.end()
