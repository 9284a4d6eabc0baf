"""Asynchronous saves: writing a checkpoint while training goes on.

A save has two halves. At a step boundary each rank copies its pieces to host memory; training waits
only for the copy, and the next save reuses the memory. Then a thread of each rank writes the copies
to the staging folder, and increments a counter in the rendezvous store. Rank 0's thread waits until
the counter reaches the number of ranks, and commits. No thread enters a collective: collectives
belong to training. At a later step boundary all ranks get the outcome together
(:meth:`AsyncSaver.finish`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import (
    SHARD_BYTES,
    Meta,
    Piece,
    SaveGroup,
    commit,
    described,
    discard,
    not_saved,
    run_on_all,
    stage,
    write,
)
from megapipe.errors import CheckpointError

LOOK_S = 0.02
"""Seconds between rank 0's checks of how many ranks have written their files."""
_BLOCK = 1 << 28
"""Minimum bytes of an allocation: a power of two, as torch rounds page-locked memory up to one."""
_ALIGNMENT = 64


class Counter(Protocol):
    """Methods of a rendezvous store (``torch.distributed.Store``) that are called during a save."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to the number under `key`, initially 0; returns the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the text under `key` to `desired` if it is `expected`; a missing text equals ''."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """Return the text under `key`; wait until it exists."""


class Snapshot:
    """Copies of pieces in host memory, which is allocated once and reused by later snapshots.

    With `pinned` the memory is page-locked, so that copies from a GPU reach the link's full speed.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy the pieces to host memory and return the copies. The next call overwrites them."""
        taken, on_gpu = [], False
        number, end = -1, 0
        for piece in pieces:
            source = piece.tensor.detach()
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if number < 0 or start + source.nbytes > len(self._blocks[number]):
                number, start = number + 1, 0
                if number == len(self._blocks) or source.nbytes > len(self._blocks[number]):
                    self._blocks[number:] = [self._block(source.nbytes)]
            end = start + source.nbytes
            copy = self._blocks[number][start:end].view(source.dtype).view(source.shape)
            copy.copy_(source, non_blocking=True)
            on_gpu |= source.is_cuda
            taken.append(Piece(piece.name, piece.shape, piece.region, copy))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return taken

    def _block(self, nbytes: int) -> Tensor:
        """Allocate `nbytes` or more of memory, as uint8. Raises CheckpointError."""
        nbytes = max(_BLOCK, nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except (RuntimeError, MemoryError):
            raise CheckpointError(
                f"host memory is too small for a copy of the state ({nbytes >> 20} MiB): set "
                "checkpoint.async_save=false"
            ) from None


@dataclass
class _Attempt:
    """One asynchronous save."""

    staging: StorageLocation
    step: int
    meta: Meta
    is_ours: Callable[[], None]
    """Function that raises an exception if another job has taken over the run folder."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set once this rank has written its files, or has failed to write them."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set on rank 0 once the checkpoint is committed, or the save has failed."""
    name: str = ""
    fault: str = ""


class AsyncSaver:
    """Saves checkpoints of the ranks of `group` asynchronously, one at a time. `counter` is the
    rendezvous store that all ranks share."""

    def __init__(
        self,
        group: SaveGroup,
        counter: Counter,
        *,
        pinned: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._group = group
        self._counter = counter
        self._snapshot = Snapshot(pinned=pinned)
        self._shard_bytes = shard_bytes
        self._attempt: _Attempt | None = None

    @property
    def step(self) -> int | None:
        """Step whose state is being saved; None between saves. The value is equal on all ranks."""
        return self._attempt.step if self._attempt is not None else None

    @property
    def ended(self) -> bool:
        """Whether :meth:`finish` would not have to wait; always False on ranks other than 0."""
        return self._attempt is not None and self._attempt.ended.is_set()

    def begin(
        self,
        root: StorageLocation,
        *,
        step: int,
        pieces: Iterable[Piece],
        meta: Meta,
        is_ours: Callable[[], None],
        nbytes: int = 0,
    ) -> None:
        """Start a :func:`~megapipe.checkpoint.writer.save`; return once the pieces are copied.

        Collective: call it on all ranks, after the previous save is finished. Rank 0 calls
        `is_ours` just before it commits; the save fails if `is_ours` raises an exception, because
        another job has taken over the run folder. Raises CheckpointError on every rank if any rank
        lacks a staging folder, host memory, or disk space for `nbytes`.
        """
        assert self._attempt is None, "finish the save before this one"
        staging = stage(root, step, self._group, nbytes)
        try:
            taken = run_on_all(self._group, lambda: self._snapshot.take(pieces))
        except Exception:
            if self._group.rank == 0:
                discard(staging)
            raise
        attempt = self._attempt = _Attempt(staging, step, meta, is_ours)
        threading.Thread(
            target=self._save, args=(attempt, taken), name="checkpoint", daemon=True
        ).start()

    def finish(self) -> StorageLocation:
        """Wait for the end of the save; return the checkpoint's folder on every rank.

        Collective. Raises CheckpointError on all ranks if the save has failed on any rank; the
        staging folder is then removed, and earlier checkpoints are unchanged.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "no save is in progress"
        lead = self._group.rank == 0
        attempt.written.wait()
        self._group.agree(None)  # fails if a rank is gone, so that nobody waits for it
        if lead:
            attempt.ended.wait()
        fault = self._group.agree(attempt.fault or None)
        if fault is not None:
            if lead:
                discard(attempt.staging)
            raise not_saved(fault)
        return attempt.staging.parent / self._group.share(attempt.name)

    def _save(self, attempt: _Attempt, taken: list[Piece]) -> None:
        """Write this rank's files and increment the counter in the store; rank 0 also commits."""
        rank, key = self._group.rank, f"megapipe/{attempt.staging.name}"
        try:
            write(attempt.staging, attempt.step, taken, attempt.meta, rank, self._shard_bytes)
        except Exception as error:
            attempt.fault = f"rank {rank}: {described(error)}"
        attempt.written.set()
        try:
            if attempt.fault:
                text = attempt.fault.encode(errors="replace").decode()
                self._counter.compare_set(f"{key}/fault", "", text)
            self._counter.add(f"{key}/written", 1)
            if rank == 0:
                self._commit(attempt, key)
        except Exception as error:  # the store is gone, or the checkpoint cannot be committed
            attempt.fault = attempt.fault or f"rank {rank}: {described(error)}"
        attempt.ended.set()

    def _commit(self, attempt: _Attempt, key: str) -> None:
        while self._counter.add(f"{key}/written", 0) < self._group.world:
            time.sleep(LOOK_S)
        if self._counter.check([f"{key}/fault"]):
            attempt.fault = self._counter.get(f"{key}/fault").decode()
            return
        attempt.is_ours()
        attempt.name = commit(attempt.staging, attempt.step, attempt.meta, self._group.world)
