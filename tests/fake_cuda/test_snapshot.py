"""Snapshots for asynchronous saves: into pinned memory, copied once, and waited for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megapipe.checkpoint.async_save import Snapshot
from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.writer import Piece
from megapipe.testing import WorldError
from tests.fake_cuda.world import run_world

SIZES = (3, 1000, 0, 17)


def saves(world: Any) -> None:
    """Save three times; after each save training changes the copied tensors."""
    snapshot, addresses = Snapshot(pinned=True), set()
    held = [torch.arange(n, dtype=torch.float32, device="cuda") for n in SIZES]
    for save in range(3):
        pieces = [Piece(f"x{len(x)}", (len(x),), Region((0,), (len(x),)), x) for x in held]
        copies = snapshot.take(pieces)
        for tensor in held:
            tensor.add_(1)
        for copy, n in zip(copies, SIZES, strict=True):
            assert copy.tensor.is_pinned() or not n
            assert copy.tensor.tolist() == [save + i for i in range(n)]
        addresses.add(copies[0].tensor.data_ptr())
    assert len(addresses) == 1


def saves_without_waiting(world: Any) -> None:
    with mock.patch.object(torch.cuda, "current_stream"):  # whose end is not waited for then
        saves(world)


def test_copies_are_right_and_their_memory_is_used_again() -> None:
    run_world(1, saves)


def test_copies_that_are_read_too_early_are_noticed() -> None:
    with pytest.raises(WorldError, match="AssertionError"):
        run_world(1, saves_without_waiting)
