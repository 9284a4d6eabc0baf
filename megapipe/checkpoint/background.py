"""Saving a checkpoint while training goes on.

A save has two halves. At a step boundary each rank copies its pieces to host memory, which is all
that training waits for; the memory is kept for the next save. Then a thread of each rank writes
its copies to the staging folder and counts itself in the rendezvous store; that of rank 0 waits for
all of them and commits. No thread enters a collective: those belong to training. At a later step
boundary all ranks take the outcome together (:meth:`AsyncSaver.finish`).
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
"""Time between two looks of rank 0 at what the others have written."""
_BLOCK = 1 << 28
"""Bytes that a snapshot asks for at once; page-locked memory comes in powers of two."""
_ALIGNMENT = 64


class Counter(Protocol):
    """The part of a rendezvous store (``torch.distributed.Store``) that is used."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that is 0 at first; returns the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a text if it is `expected`, as one that is not there is ''."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def get(self, key: str, /) -> bytes:
        """The text, once it is there."""


class Snapshot:
    """Copies of pieces in host memory, which is taken at first and used again by all later ones.

    With `pinned` it is page-locked, so that copies from a GPU run at the speed of its link.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces as they are now; the copies are overwritten by the next call."""
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
        """New memory for at least so many bytes, uint8. Raises CheckpointError."""
        nbytes = max(_BLOCK, nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except (RuntimeError, MemoryError):
            raise CheckpointError(
                f"the host has no {nbytes >> 20} MiB more for a copy of the state: set "
                "checkpoint.background=false"
            ) from None


@dataclass
class _Attempt:
    """A save under way."""

    staging: StorageLocation
    step: int
    meta: Meta
    is_ours: Callable[[], None]
    written: threading.Event = field(default_factory=threading.Event)
    """This rank has written its part, or failed to."""
    ended: threading.Event = field(default_factory=threading.Event)
    """On rank 0: there is a checkpoint, or there will be none."""
    name: str = ""
    fault: str = ""


class AsyncSaver:
    """Saves of the ranks of `group`, one at a time; `counter` is a store that all of them reach."""

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
        """The step whose state is being saved, None if none is; the same on every rank."""
        return self._attempt.step if self._attempt is not None else None

    @property
    def ended(self) -> bool:
        """Whether :meth:`finish` would wait for nothing, as rank 0 knows; False on all others."""
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
        """Begin what :func:`~megapipe.checkpoint.writer.save` does; returns when the pieces are
        copied.

        To be called by all ranks, once the save before is finished. Rank 0 calls `is_ours` just
        before it commits: what it raises is the save's error. Raises CheckpointError on every rank
        if any has no staging folder or no memory, or the disk no room for `nbytes`.
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
        """Wait for the end of the save; returns the checkpoint's folder, on every rank.

        To be called by all ranks. Raises CheckpointError on all of them if the save has failed on
        any; staging is then removed and earlier checkpoints are as they were.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "no save is under way"
        lead = self._group.rank == 0
        attempt.written.wait()
        self._group.agree(None)  # where a rank is gone, this fails, and nobody waits for its part
        if lead:
            attempt.ended.wait()
        fault = self._group.agree(attempt.fault or None)
        if fault is not None:
            if lead:
                discard(attempt.staging)
            raise not_saved(fault)
        return attempt.staging.parent / self._group.share(attempt.name)

    def _save(self, attempt: _Attempt, taken: list[Piece]) -> None:
        """Write this rank's part and count it; commit the whole on rank 0."""
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
