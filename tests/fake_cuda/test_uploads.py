"""Copies ahead of their use: two pinned buffers in turn, and waits at both ends of the copy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.ops.transfer import Uploads
from tests.fake_cuda.world import faults_of, observe, run_world


def batches() -> list[list[Tensor]]:
    """Return batches of growing sizes, some of them odd."""
    return [[torch.arange(n) + n, torch.ones(n, 3) * n, torch.arange(n) > 2] for n in range(1, 9)]


def ahead(world: Any) -> None:
    """Use each batch after the next one's copy has started."""
    uploads = Uploads(torch.device("cuda", 0))
    taken, earlier = [], None
    for batch in batches():
        copied = uploads.start(batch)
        if earlier is not None:
            taken.append([x + 0 for x in earlier()])
        earlier = copied
    for found, right in zip(taken, batches(), strict=False):
        assert all((x.cpu() == y).all() for x, y in zip(found, right, strict=True))


def test_copies_are_ahead_and_right() -> None:
    run_world(1, ahead)


def with_one_buffer(world: Any) -> None:
    def wrong(self: Uploads, nbytes: int) -> Tensor:
        return kept[:]

    kept = torch.zeros(1024, dtype=torch.uint8).pin_memory()
    with mock.patch.object(Uploads, "_free_half", wrong):
        ahead(world)


def without_waiting(world: Any) -> None:
    def wrong(self: Any) -> Any:
        """Record an event on the stream that computes, which orders no copy."""
        return torch.cuda.current_stream().record_event()

    with mock.patch.object(torch.cuda.Stream, "record_event", wrong):
        ahead(world)


def test_a_buffer_used_again_too_early_is_noticed() -> None:
    _, reports = observe(1, with_one_buffer)
    assert "pinned memory was changed while" in "\n".join(faults_of(reports))


def test_a_batch_used_before_it_is_here_is_noticed() -> None:
    _, reports = observe(1, without_waiting)
    assert "reads what copy from the host" in "\n".join(faults_of(reports))
