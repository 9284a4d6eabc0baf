"""Ranks that are forks of one process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megapipe.launch.fork_server import TRAIN, can_fork
from tests.parity.jobs import ROOT, Job, arguments, tiny
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")

SHOW = """
import json, logging, os, resource, signal, sys, time
from pathlib import Path

def main(argv):
    import torch
    shown = {
        "argv": [sys.argv, argv],
        "main": [sys.modules["__main__"].__name__, sys.modules["__main__"].__file__, *(
            getattr(sys.modules["__main__"].__spec__, name, "") for name in ("name", "origin")
        )],
        "path": sys.path,
        "environ": {k: v for k, v in os.environ.items() if not k.startswith(("MASTER", "TORCH"))},
        "handlers": {n: str(signal.getsignal(n)) for n in (*range(1, 32),)},
        "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "wakeup": signal.set_wakeup_fd(-1),
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "parent": os.getppid() == int(os.environ["TEST_LAUNCHER"]),
        "files": sorted(
            link for f in os.listdir("/proc/self/fd")
            if (link := os.path.realpath(f"/proc/self/fd/{f}")) and os.path.exists(link)
        ),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
        "logs": logging.root.manager.disable,
        "umask": os.umask(0),
        "streams": [
            (s.encoding, s.errors, s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
    }
    folder = Path(os.environ["TEST_FOLDER"])
    (folder / os.environ["RANK"]).write_text(json.dumps(shown))
    sys.stdout.write("written, ")  # and not kept in a buffer
    while not (folder / "0").exists():
        time.sleep(0.01)
    os._exit(5 * int(os.environ["RANK"]))
"""
LAUNCH = """
import os, sys
from megapipe.launch import fork_server, launcher
fork_server.TRAIN = type(fork_server.TRAIN)({folder!r}).resolve() / "train.py"
fork_server.PACKAGE, fork_server.INIT = "package", fork_server.TRAIN.parent / "package/__init__.py"
assert launcher.can_fork({program!r})
if not {forked}:
    launcher.can_fork = lambda command: False
os.environ["TEST_LAUNCHER"] = str(os.getpid())
sys.exit(launcher.main(["--nproc", "2", *{program!r}, "a=1", "b c"]))
"""


def launched(folder: Path, program: list[str], forked: bool) -> list[dict[str, Any]]:
    """Run a launcher, and return what its ranks show of themselves."""
    (folder / "shown.py").write_text(SHOW)
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    for name in ("train.py", "package/__main__.py"):
        (folder / name).write_text("import sys\nfrom shown import main\nmain(sys.argv[1:])\n")
    program = [word.format(folder=folder) for word in program]
    code = LAUNCH.format(folder=str(folder), program=program, forked=forked)
    environ = {**os.environ, "TEST_FOLDER": str(folder), "PYTHONPATH": f"{folder}:{ROOT}"}
    environ.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert (done.returncode, done.stdout) == (5, "written, " * 2), done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@in_parts("program", [["{folder}/train.py"], ["-m", "package", "train"]], full=2, ids=str)
def test_a_rank_is_as_if_torchrun_had_started_it(program: list[str], tmp_path: Path) -> None:
    found = []
    for forked in (True, False):
        folder = tmp_path / str(forked)
        folder.mkdir()
        found.append(launched(folder, program, forked))
    for ours, theirs in zip(*found, strict=True):
        for name, value in theirs.items():
            expected = json.loads(json.dumps(value).replace("/False", "/True"))
            if name == "environ":
                for rank in (ours[name], expected):
                    del rank["TEST_LAUNCHER"]
            assert ours[name] == expected, name


def test_other_programs_are_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert can_fork(["train.py"]) == (Path("train.py").resolve() == TRAIN)
    assert can_fork([str(TRAIN), "configs/quickstart.yaml"])
    assert can_fork(["-m", "megapipe", "train"])
    other = tmp_path / "train.py"
    other.write_text("")
    assert not can_fork([str(other)])
    assert not can_fork(["-m", "megapipe.launch"])
    assert not can_fork(["-m", "megapipe", "doctor"])
    monkeypatch.chdir(tmp_path)
    assert can_fork(["-m", "megapipe", "train"])
    (tmp_path / "megapipe.py").write_text("")
    importlib.invalidate_caches()
    assert not can_fork(["-m", "megapipe", "train"])


def test_where_python_looks_in_no_folder_of_the_program_ranks_are_spawned() -> None:
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
    code += "from megapipe.launch.fork_server import TRAIN, can_fork\n"
    code += "print(can_fork([str(TRAIN)]), can_fork(['-m', 'megapipe', 'train']))"
    for flags, expected in (([], "True True\n"), (["-I"], "False False\n")):
        command = [sys.executable, *flags, "-c", code]
        assert subprocess.run(command, capture_output=True, text=True).stdout == expected


@pytest.mark.full
def test_loading_looks_for_no_device() -> None:
    """After that CUDA could not be used in a fork."""
    code = """
import torch
def refuse(*given, **named): raise AssertionError("looks for a device")
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
torch.accelerator.is_available = torch.accelerator.current_accelerator = refuse
from megapipe.launch import fork_server
fork_server._load()
import os
assert len(os.listdir("/proc/self/task")) == 1, "a thread"
"""
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # numpy's BLAS may fork with threads
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=ROOT, env=one)


@pytest.mark.full
def test_a_start_without_the_process_that_forks(tmp_path: Path) -> None:
    """It is killed, as by a system without memory, and then a rank: there is no other start."""
    with Job(tmp_path) as job:
        run = ["-m", "megapipe.launch", "--nproc", "2", "--max-restarts", "1", "train.py"]
        endless = {**tiny(tmp_path), "train.steps": "100000", "checkpoint.every": "1"}
        launcher = job.start([*run, *arguments(endless)])
        job.await_text("saved")
        ranks = set(job.pids().values())
        (forker,) = set(job.alive()) - ranks - {launcher.pid} - set(spawned(ranks))
        os.kill(forker, signal.SIGKILL)
        job.kill_ranks("saved")
        outcome = job.end()
    assert outcome.codes == [4], outcome.text
    assert "rank 0 cannot be started: the fork server has ended" in outcome.errors[-1]


def spawned(parents: set[int]) -> list[int]:
    """Return the processes that `parents` have started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in parents:
            found.append(int(status.parent.name))
    return found
