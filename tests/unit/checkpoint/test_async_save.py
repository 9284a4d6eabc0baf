"""Asynchronous saves: what they write, and what a failure or a death leaves."""

import errno
import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from megapipe.checkpoint import Checkpoint, Piece, find_newest, save, whole
from megapipe.checkpoint import async_save as module
from megapipe.checkpoint.async_save import AsyncSaver, Snapshot
from megapipe.checkpoint.names import POINTER
from megapipe.errors import CheckpointError, LaunchError
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    ThreadGroup,
    assert_holds,
    flat_cut,
    run_world,
    save_alone,
    tensors,
)


def nothing() -> None:
    """Accept the folder as ours."""


def saving(root: Path, **options: object) -> Callable[[ThreadGroup], Path]:
    """Return a rank's part of a save of `tensors(2)` after step 2."""
    store, pieces = HashStore(), tensors(2)

    def work(group: ThreadGroup) -> Path:
        background = AsyncSaver(group, store, shard_bytes=1200)
        own = flat_cut(pieces, group.rank, group.world)
        given = {"is_ours": nothing, **options}
        background.begin(root, step=2, pieces=own, meta=META, **given)
        assert background.step == 2
        path = background.finish()
        assert background.step is None
        assert not background.ended
        return path

    return work


@pytest.mark.parametrize("world", [1, 3])
def test_it_writes_what_a_save_writes_that_is_waited_for(tmp_path: Path, world: int) -> None:
    assert set(run_world(world, saving(tmp_path / "a"))) == {tmp_path / "a" / "step-00000002"}

    def waiting(group: ThreadGroup) -> Path:
        own = flat_cut(tensors(2), group.rank, world)
        return save(tmp_path / "b", step=2, pieces=own, meta=META, group=group, shard_bytes=1200)

    run_world(world, waiting)
    folders = [tmp_path / name / "step-00000002" for name in "ab"]
    assert len(list(folders[0].iterdir())) > world
    assert find_newest(tmp_path / "a").path == folders[0]
    for first, second in zip(*(sorted(folder.iterdir()) for folder in folders), strict=True):
        if first.name != "manifest.json":  # which has the time
            assert first.read_bytes() == second.read_bytes(), first.name
    manifests = [Checkpoint.open(folder).manifest for folder in folders]
    assert manifests[0].files == manifests[1].files
    assert manifests[0].entries == manifests[1].entries


def test_training_goes_on_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until rank 1 has written, nobody has a checkpoint; later values are not in it."""
    go_on, real = threading.Event(), module.write

    def write(staging: Path, step: int, pieces: object, meta: object, rank: int, n: int) -> None:
        assert rank == 0 or go_on.wait(10)
        real(staging, step, pieces, meta, rank, n)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write", write)
    store, state, met = HashStore(), tensors(2), threading.Barrier(2)

    def work(group: ThreadGroup) -> tuple[bool, bool]:
        background = AsyncSaver(group, store)
        own = flat_cut(state, group.rank, 2)
        background.begin(tmp_path, step=2, pieces=own, meta=META, is_ours=nothing)
        time.sleep(0.1)
        before = background.ended
        met.wait(10)
        if group.rank == 0:
            assert not list(tmp_path.glob("step-*"))
            for tensor in state.values():
                tensor.zero_()
            go_on.set()
            while not background.ended:
                time.sleep(0.005)
        after = background.ended
        assert background.finish() == tmp_path / "step-00000002"
        return before, after

    assert run_world(2, work) == [(False, True), (False, False)], "rank 0 knows"
    assert_holds(tmp_path / "step-00000002", 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_write(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = save_alone(tmp_path, 1, seed=1), module.write

    def write(staging: Path, step: int, pieces: object, meta: object, own: int, n: int) -> None:
        if own == rank:
            raise OSError(errno.ENOSPC, "No space left on device", "the file")
        real(staging, step, pieces, meta, own, n)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write", write)
    for result in run_world(3, saving(tmp_path)):
        assert isinstance(result, CheckpointError)
        words = f"checkpoint not saved: rank {rank}: the file: No space left on device"
        assert str(result) == words
    assert {path.name for path in tmp_path.iterdir()} == {before.name, POINTER}
    assert find_newest(tmp_path) == (before, [])
    monkeypatch.setattr(module, "write", real)
    assert find_newest(tmp_path) == (before, [])
    assert set(run_world(3, saving(tmp_path))) == {tmp_path / "step-00000002"}


def test_a_folder_that_another_job_has_taken_gets_no_checkpoint(tmp_path: Path) -> None:
    def is_ours() -> None:
        raise LaunchError("the folder was taken over")

    for result in run_world(2, saving(tmp_path, is_ours=is_ours)):
        assert isinstance(result, CheckpointError)
        assert str(result) == "checkpoint not saved: rank 0: the folder was taken over"
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_left_as_it_is(tmp_path: Path) -> None:
    for result in run_world(2, saving(tmp_path, nbytes=10**18)):
        assert isinstance(result, CheckpointError)
        words = (
            r"checkpoint not saved: rank 0: .* has [\d.e+]+ GB free, 1e\+09 GB are to be written"
        )
        assert re.match(words, str(result))
    assert not list(tmp_path.iterdir())


def test_pieces_that_are_no_checkpoint(tmp_path: Path) -> None:
    def work(group: ThreadGroup) -> Path:
        background = AsyncSaver(group, HashStore())
        piece = Piece("model/x", (4,), whole((2,)), torch.zeros(2))
        background.begin(tmp_path, step=2, pieces=[piece], meta=META, is_ours=nothing)
        return background.finish()

    (result,) = run_world(1, work)
    assert isinstance(result, CheckpointError)
    assert "model/x" in str(result)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    """The others do not wait for its part: their next exchange fails."""
    store = HashStore()

    def work(group: ThreadGroup) -> Path:
        background = AsyncSaver(group, store)
        own = flat_cut(tensors(2), group.rank, 2)
        if group.rank == 1:
            background._counter = None  # type: ignore[assignment]
        background.begin(tmp_path, step=2, pieces=own, meta=META, is_ours=nothing)
        if group.rank == 1:
            raise KeyboardInterrupt
        return background.finish()

    first, second = run_world(2, work)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, KeyboardInterrupt)
    assert not list(tmp_path.glob("step-*"))


def test_memory_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of odd sizes, some larger than a block, begin at multiples of 64 bytes."""
    monkeypatch.setattr(module, "_BLOCK", 1000)
    snapshot = Snapshot()
    sizes = [1, 7, 200, 0, 90, 1500, 3, 240]

    def pieces(value: float) -> list[Piece]:
        return [
            Piece(f"x{n}", (size,), whole((size,)), torch.full((size,), value))
            for n, size in enumerate(sizes)
        ]

    first = snapshot.take(pieces(1.0))
    places = [piece.tensor.data_ptr() for piece in first]
    second = snapshot.take(pieces(2.0))
    assert [piece.tensor.data_ptr() for piece in second] == places
    for piece, given in zip(second, pieces(2.0), strict=True):
        assert torch.equal(piece.tensor, given.tensor)
        assert (piece.name, piece.shape, piece.region) == (given.name, given.shape, given.region)
        assert piece.tensor.storage_offset() * 4 % 64 == 0
    spans = sorted((p.tensor.data_ptr(), p.tensor.nbytes) for p in second if p.tensor.numel())
    for (start, size), (after, _) in itertools.pairwise(spans):
        assert start + size <= after
    grown = snapshot.take([Piece("y", (2000,), whole((2000,)), torch.ones(2000))])
    assert torch.equal(grown[0].tensor, torch.ones(2000))
