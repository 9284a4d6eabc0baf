"""spawn: local processes for scripts and notebooks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.errors import LaunchError
from megapipe.launch import local
from megapipe.launch.local import RankError, World, spawn

ROOT = Path(__file__).resolve().parents[3]


def test_a_function_that_nobody_could_import_runs_on_every_rank() -> None:
    """After torch has computed in this process with its threads."""
    big = torch.randn(300, 300, requires_grad=True)
    (big @ big).sum().backward()

    def total(world: World, factor: int) -> tuple[int, int, float]:
        x = torch.full((300, 300), float(factor * world.rank), requires_grad=True)
        (x @ x).sum().backward()
        dist.all_reduce(value := x.detach()[0, 0].clone())
        return world.rank, world.size, value.item()

    assert spawn(total, 3, 10) == [(0, 3, 30.0), (1, 3, 30.0), (2, 3, 30.0)]
    assert not dist.is_initialized()


def test_a_rank_that_has_returned_is_there_until_all_have() -> None:
    """What it has sent arrives."""
    sent: list[Any] = []

    def send(world: World) -> list[float]:
        values = torch.arange(3.0)
        if world.rank == 0:
            sent.append(dist.isend(values, 1))
        else:
            time.sleep(0.5)
            dist.recv(values.zero_(), 0)
        return list(values.tolist())

    assert spawn(send, 2) == [[0.0, 1.0, 2.0]] * 2


def test_an_error_that_is_kept_keeps_no_store() -> None:
    """A later rank that collects it as garbage would wait for a thread that forks do not have."""

    def fail(world: World) -> None:
        raise ValueError("no")

    def stores() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith("pt_tcpstore") for name in names)

    before = stores()
    with pytest.raises(RankError) as caught:
        spawn(fail, 2)
    assert stores() == before, caught


def test_an_exception_of_a_rank_comes_back_with_its_traceback() -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spawn(fail, 3)
    assert time.monotonic() - start < 20
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 3: ValueError: only here"
    assert "in fail" in caught.value.failures[1]


def test_what_cannot_work_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="ranks=0: expected at least 1"):
        spawn(print, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        LaunchError, match=r"CUDA is in use, so new processes must import .*<lambda>"
    ):
        spawn(lambda world: None, 2)


def rank_of(world: World) -> int:
    return world.rank


def test_where_a_fork_is_unsafe_processes_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert local._context(rank_of).get_start_method() == "spawn"


def nested(world: World) -> None:
    spawn(rank_of, 2)


def test_a_rank_cannot_spawn() -> None:
    with pytest.raises(RankError, match="this process is in a process group"):
        spawn(nested, 1)


def python(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_a_plain_script_spawns_functions_of_its_own(tmp_path: Path) -> None:
    """Without a guard around what it does."""
    (tmp_path / "plain.py").write_text(
        "import megapipe\n"
        "class Found:\n"
        "    def __init__(self, rank):\n"
        "        self.rank = rank\n"
        "def find(world):\n"
        "    return Found(world.rank)\n"
        "print([found.rank for found in megapipe.spawn(find, 2)])\n"
    )
    process = python("plain.py", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("[0, 1]\n", 0), err


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    """The interrupt reaches one process alone, as a notebook's does."""
    (tmp_path / "slow.py").write_text(
        "import os, time, megapipe\n"
        "def wait(world):\n"
        "    open(f'rank {world.rank}.tmp', 'w').write(str(os.getpid()))\n"
        "    os.rename(f'rank {world.rank}.tmp', f'rank {world.rank}')\n"
        "    time.sleep(600)\n"
        "megapipe.spawn(wait, 2)\n"
    )
    process = python("slow.py", cwd=tmp_path)
    files = [tmp_path / f"rank {rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not any(is_running(int(file.read_text())) for file in files)
