"""Channels between two processes: order, acknowledgements, and what the debug mode catches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.engine.channels import (
    ProcessGroupChannels,
)
from megapipe.schedule.ir import Kind
from megapipe.testing import World, run_world
from tests.parity.messages import ANSWERS, FORWARD, expected, tensor_of


@dataclass
class Seen:
    """What one of two ranks saw."""

    values: list[float] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    headers: list[int] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    let_go: list[bool] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)


def connect(
    mesh: ParallelMesh, *, debug: bool = False, dtype: torch.dtype = torch.float64
) -> ProcessGroupChannels:
    return ProcessGroupChannels(mesh, [(0, 1), (1, 0)], dtype=dtype, debug=debug)


class Watched:
    """A process group that notes the buffers with which receives are posted."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.posted: list[tuple[torch.dtype, bool]] = []
        """Type of each buffer, and whether it is NaN throughout."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        (buffer,) = tensors
        self.posted.append((buffer.dtype, bool(buffer.isnan().all())))
        return self.group.recv(tensors, peer, tag)


def order(mesh: ParallelMesh, seen: Seen) -> None:
    """Send everything on rank 0 before rank 1 receives; answers acknowledge. Two steps use one
    channel."""
    for debug in (False, True):
        channels = connect(mesh, debug=debug)
        for _ in range(2):
            if mesh.rank == 0:
                there, back = channels.outgoing[1], channels.incoming[1]
                back.expect(expected(ANSWERS))
                for message in FORWARD:
                    there.send(message, tensor_of(message))
                mesh.barrier()
                for acks in (1, 2):
                    seen.in_flight.append(len(there.in_flight))
                    seen.values.append(back.receive().unique().item())
                    there.acknowledge(acks)
                seen.in_flight.append(len(there.in_flight))
                there.finish()
                seen.in_flight.append(len(there.in_flight))
            else:
                there, back = channels.outgoing[0], channels.incoming[0]
                back.expect(expected(FORWARD))
                mesh.barrier()
                for _ in range(3):
                    seen.values.append(back.receive().unique().item())
                for message in ANSWERS:
                    there.send(message, tensor_of(message))
                seen.values.append(back.receive().unique().item())
                there.finish()


def receives_ahead(mesh: ParallelMesh, seen: Seen) -> None:
    channels = connect(mesh)
    if mesh.rank == 0:
        for message in FORWARD:
            channels.outgoing[1].send(message, tensor_of(message))
        channels.outgoing[1].finish()
    else:
        line = channels.incoming[0]
        watched = line.group = Watched(line.group)
        line.expect(expected(FORWARD))
        seen.posted.append(len(watched.posted))
        for number in range(len(FORWARD)):
            if number % 2:
                line.post()
                seen.posted.append(len(watched.posted))
            line.receive()
            seen.posted.append(len(watched.posted))


def headers_ahead(mesh: ParallelMesh, seen: Seen) -> None:
    """Check that in debug mode a message's header is received ahead, but the message when it is
    needed."""
    channels = connect(mesh, debug=True)
    if mesh.rank == 0:
        for message in FORWARD[:2]:
            channels.outgoing[1].send(message, tensor_of(message))
        channels.outgoing[1].finish()
    else:
        line = channels.incoming[0]
        watched = line.group = Watched(line.group)
        line.post()
        seen.headers.append(len(watched.posted))
        line.expect(expected(FORWARD[:2]))
        for _ in range(2):
            for _ in range(2):
                line.post()
                seen.headers.append(len(watched.posted))
            line.receive()
            seen.headers.append(len(watched.posted))


def tensors_with_gaps(mesh: ParallelMesh, seen: Seen) -> None:
    """They arrive whole."""
    for debug in (False, True):
        channels = connect(mesh, debug=debug)
        gaps = torch.arange(12, dtype=torch.float64).view(2, 6)[:, ::2]
        if mesh.rank == 0:
            channels.outgoing[1].send(FORWARD[0], gaps)
            channels.outgoing[1].finish()
        else:
            channels.incoming[0].expect(expected(FORWARD[:1]))
            assert channels.incoming[0].receive().equal(gaps)


def buffers_are_nan(mesh: ParallelMesh, seen: Seen) -> None:
    """Before a receive in debug mode, and what was sent, once it is let go."""
    channels = connect(mesh, debug=True, dtype=torch.bfloat16)
    if mesh.rank == 0:
        there, own = channels.outgoing[1], tensor_of(FORWARD[0], torch.bfloat16)
        there.send(FORWARD[0], own)
        sent = [tensor for _, tensor in there.in_flight if tensor.is_floating_point()]
        mesh.barrier()
        there.finish()
        seen.let_go = [bool(tensor.isnan().all()) for tensor in (*sent, own)]
    else:
        back = channels.incoming[0]
        watched = back.group = Watched(back.group)
        back.expect(expected(FORWARD[:1]))
        received = back.receive()
        seen.filled = [nan for dtype, nan in watched.posted if dtype == torch.bfloat16]
        seen.filled.append(bool(received.isnan().any()))
        mesh.barrier()


def wrong_messages(mesh: ParallelMesh, seen: Seen) -> None:
    """Send on rank 0 what rank 1 does not expect; the payload is left where it is."""
    for sent, shape, dtype in (
        (FORWARD[2], (2, 4), torch.float64),  # another micro-batch
        (FORWARD[1]._replace(stage=4), (2, 4), torch.float64),
        (FORWARD[1]._replace(kind=Kind.I), (2, 4), torch.float64),
        (FORWARD[1]._replace(slice=1), (2, 4), torch.float64),
        (FORWARD[1], (4, 2), torch.float64),
        (FORWARD[1], (2, 8), torch.float32),
        (FORWARD[1], (2, 40), torch.float64),  # more than the buffer would hold
        (FORWARD[1], (2, 4), torch.float64),  # right
    ):
        channels = connect(mesh, debug=True)
        if mesh.rank == 0:
            channels.outgoing[1].send(sent, torch.ones(shape, dtype=dtype))
        else:
            channels.incoming[0].expect(expected(FORWARD[1:2]))
            try:
                channels.incoming[0].receive()
                seen.caught.append("")
            except AssertionError as error:
                seen.caught.append(str(error))
    if mesh.rank == 0:
        channels.outgoing[1].finish()


def visit(world: World) -> Seen:
    mesh, seen = world.mesh(Grid(pp=2)), Seen()
    order(mesh, seen)
    receives_ahead(mesh, seen)
    headers_ahead(mesh, seen)
    tensors_with_gaps(mesh, seen)
    buffers_are_nan(mesh, seen)
    wrong_messages(mesh, seen)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[Seen]:
    return run_world(2, visit)


def test_messages_arrive_in_the_order_sent(ranks: list[Seen]) -> None:
    assert ranks[1].values == [1.0, 2.0, 3.0, 4.0] * 4
    assert ranks[0].values == [1.0, 2.0] * 4, "the other direction has a line of its own"


def test_acknowledged_sends_are_let_go_at_once_and_the_rest_at_the_end(ranks: list[Seen]) -> None:
    plain, with_headers = [4, 3, 1, 0], [8, 6, 2, 0]
    assert ranks[0].in_flight == [*plain, *plain, *with_headers, *with_headers]


def test_a_receive_is_posted_once_ahead_or_when_it_is_needed(ranks: list[Seen]) -> None:
    assert ranks[1].posted == [0, 1, 2, 2, 3, 4, 4]
    assert ranks[1].headers == [0, 1, 1, 2, 3, 3, 4]


def test_debug_fills_buffers_with_nan(ranks: list[Seen]) -> None:
    assert ranks[1].filled == [True, False]
    assert ranks[0].let_go == [True, False], "the copy that was sent, not the sender's own"


def test_debug_catches_a_message_that_is_not_the_expected_one(ranks: list[Seen]) -> None:
    *wrong, right = ranks[1].caught
    assert right == ""
    assert len(wrong) == 7
    for text in wrong:
        assert text.startswith("rank 1 expected 0F1 of shape (2, 4) from rank 0, got [")
    assert len(set(wrong)) == 7, "and says what came instead"
