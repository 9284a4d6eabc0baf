"""Looks at a checkpoint while training goes on: what each rank learns, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megapipe.checkpoint import Checkpoint, save
from megapipe.checkpoint.checking import AsyncRemoval, AsyncVerify
from tests.unit.checkpoint.checkpoint_worlds import META, ThreadGroup, flat_cut, run_world, tensors

WORLD = 3
Outcome = tuple[Checkpoint | None, str]


def looked_at(path: Path) -> list[Outcome]:
    """Return what each rank finds in a checkpoint."""
    store = HashStore()

    def work(group: ThreadGroup) -> Outcome:
        check = AsyncVerify(path, group, store)
        if group.rank == 0:
            until(lambda: check.ended)
        outcome = check.finish()
        assert check.ended == (group.rank == 0)
        return outcome

    return run_world(WORLD, work)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a checkpoint of three ranks, all of whose values are finite."""
    finite = {name: values.nan_to_num(0, 1, -1) for name, values in tensors(2).items()}

    def work(group: ThreadGroup) -> Path:
        own = flat_cut(finite, group.rank, WORLD)
        return save(tmp_path, step=2, pieces=own, meta=META, group=group, shard_bytes=1200)

    return run_world(WORLD, work)[0]


def test_all_ranks_learn_that_it_is_whole(path: Path) -> None:
    for checkpoint, problem in looked_at(path):
        assert problem == ""
        assert checkpoint is not None
        assert checkpoint.step == 2


def test_all_ranks_learn_of_a_flipped_bit_in_the_share_of_one(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for checkpoint, problem in looked_at(path):
        assert checkpoint is None
        assert f"{file.name} is damaged" in problem


def test_nobody_waits_before_the_last_rank_has_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, store, real = threading.Event(), HashStore(), Checkpoint.open_sound

    def held(path: Path, rank: int, world: int, threads: int) -> Checkpoint:
        assert rank != 1 or go_on.wait(10)
        return real(path, rank, world, threads=threads)

    monkeypatch.setattr(Checkpoint, "open_sound", held)

    def work(group: ThreadGroup) -> Outcome:
        check = AsyncVerify(path, group, store)
        if group.rank == 0:
            until(lambda: store.add(f"megapipe/checked/{path}", 0) == WORLD - 1)
            assert not check.ended
            go_on.set()
            until(lambda: check.ended)
        return check.finish()

    assert all(checkpoint is not None for checkpoint, _ in run_world(WORLD, work))


def test_an_error_of_another_kind_is_a_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "verify", lambda *_, **__: 1 / 0)
    for checkpoint, problem in looked_at(path):
        assert checkpoint is None
        assert problem.endswith("ZeroDivisionError: division by zero")


def test_a_removal_tells_its_problems() -> None:
    go_on = threading.Event()

    def remove() -> list[str]:
        assert go_on.wait(10)
        return ["cannot remove a"]

    removing = AsyncRemoval(remove)
    assert not removing.ended
    go_on.set()
    assert removing.finish() == ["cannot remove a"]
    assert removing.ended
