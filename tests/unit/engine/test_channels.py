"""One-way channels: order, acknowledgements, and what the debug mode catches."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megapipe.engine.channels import InProcessChannels, ProcessGroupChannels
from megapipe.mesh import Grid, ParallelMesh
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import Action, Do
from megapipe.testing import World, run_world

FORWARD = [Action(Do.SEND, Kind.F, 0, i, peer=1) for i in range(4)]
ARRIVING = [Action(Do.RECV, Kind.F, 0, i, peer=0) for i in range(4)]


def test_queues_in_one_process_keep_the_order_and_hand_over_the_tensor() -> None:
    sender, receiver = InProcessChannels.connect(2)
    tensors = [torch.zeros(i) for i in range(4)]
    assert not receiver.arrived(ARRIVING[0])
    for action, tensor in zip(FORWARD, tensors, strict=True):
        sender.send(action, tensor)
    assert not sender.arrived(ARRIVING[0]._replace(peer=1)), "one way"
    for action, tensor in zip(ARRIVING, tensors, strict=True):
        assert receiver.arrived(action)
        assert receiver.receive(action) is tensor
    assert not receiver.arrived(ARRIVING[0])


def test_a_message_out_of_order_is_noticed_in_one_process() -> None:
    sender, receiver = InProcessChannels.connect(2)
    sender.send(FORWARD[1], torch.zeros(1))
    with pytest.raises(AssertionError, match="expected 0F0, got 0F1"):
        receiver.receive(ARRIVING[0])


@dataclass
class Seen:
    """What one of two ranks saw."""

    values: list[float] = field(default_factory=list)
    under_way: list[int] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)


def shape_of(microbatch: int, slice_: int) -> tuple[int, ...]:
    return (2, 3 + microbatch)


def connect(
    mesh: ParallelMesh, *, debug: bool = False, dtype: torch.dtype = torch.float64
) -> ProcessGroupChannels:
    return ProcessGroupChannels(mesh, [(0, 1), (1, 0)], shape=shape_of, dtype=dtype, debug=debug)


def message(action: Action, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    shape = shape_of(action.microbatch, 0)
    return torch.full(shape, float(action.microbatch + 1), dtype=dtype)


def order(mesh: ParallelMesh, seen: Seen) -> None:
    """Rank 0 sends all before rank 1 takes any; then answers acknowledge what has arrived."""
    answers = [Action(Do.RECV, Kind.I, 1, 0, peer=1, acks=3), Action(Do.RECV, Kind.I, 1, 1, peer=1)]
    for debug in (False, True):
        channels = connect(mesh, debug=debug)
        if mesh.rank == 0:
            channels.start([*FORWARD, *answers])
            for action in FORWARD:
                channels.send(action, message(action))
            mesh.barrier()
            for action in answers:
                seen.under_way.append(len(channels.outgoing[1].under_way))
                seen.values.append(channels.receive(action).unique().item())
            seen.under_way.append(len(channels.outgoing[1].under_way))
            channels.finish()
            seen.under_way.append(len(channels.outgoing[1].under_way))
        else:
            channels.start([*ARRIVING, *(Action(Do.SEND, Kind.I, 1, i, peer=0) for i in (0, 1))])
            mesh.barrier()
            for action in ARRIVING[:3]:
                seen.values.append(channels.receive(action).unique().item())
            for i in range(2):
                answer = Action(Do.SEND, Kind.I, 1, i, peer=0)
                channels.send(answer, message(answer))
            seen.values.append(channels.receive(ARRIVING[3]).unique().item())
            channels.finish()


def sliced_tensors(mesh: ParallelMesh, seen: Seen) -> None:
    """A tensor with gaps arrives whole."""
    channels = connect(mesh)
    channels.start(FORWARD[:1] if mesh.rank == 0 else ARRIVING[:1])
    gaps = torch.arange(12, dtype=torch.float64).view(2, 6)[:, ::2]
    if mesh.rank == 0:
        channels.send(FORWARD[0], gaps)
    else:
        assert channels.receive(ARRIVING[0]).equal(gaps)
    channels.finish()


def buffers_start_as_nan(mesh: ParallelMesh, seen: Seen) -> None:
    channels = connect(mesh, debug=True, dtype=torch.bfloat16)
    channels.start(FORWARD[:1] if mesh.rank == 0 else ARRIVING[:1])
    if mesh.rank == 0:
        channels.send(FORWARD[0], message(FORWARD[0], torch.bfloat16))
    else:
        post = channels.incoming[0].post

        def watched(tensors: list[torch.Tensor]) -> None:
            seen.filled.append(bool(tensors[0].isnan().all()))
            post(tensors)

        channels.incoming[0].post = watched  # type: ignore[method-assign]
        received = channels.receive(ARRIVING[0])
        seen.filled.append(bool(received.isnan().any()))
    channels.finish()


def wrong_messages(mesh: ParallelMesh, seen: Seen) -> None:
    """Rank 0 sends what rank 1 does not expect; the payload is left where it is."""
    for sent, shape, dtype in (
        (FORWARD[2], (2, 4), torch.float64),  # another micro-batch
        (FORWARD[1]._replace(stage=4), (2, 4), torch.float64),
        (FORWARD[1]._replace(kind=Kind.I), (2, 4), torch.float64),
        (FORWARD[1], (4, 2), torch.float64),
        (FORWARD[1], (2, 8), torch.float32),
        (FORWARD[1], (2, 40), torch.float64),  # more than the buffer would hold
        (FORWARD[1], (2, 4), torch.float64),  # right
    ):
        channels = connect(mesh, debug=True)
        if mesh.rank == 0:
            channels.start([sent])
            channels.send(sent, torch.ones(shape, dtype=dtype))
        else:
            channels.start([ARRIVING[1]])
            try:
                channels.receive(ARRIVING[1])
                seen.caught.append("")
            except AssertionError as error:
                seen.caught.append(str(error))
    channels.finish()


def visit(world: World) -> Seen:
    mesh, seen = world.mesh(Grid(pp=2)), Seen()
    order(mesh, seen)
    sliced_tensors(mesh, seen)
    buffers_start_as_nan(mesh, seen)
    wrong_messages(mesh, seen)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[Seen]:
    return run_world(2, visit)


def test_messages_arrive_in_the_order_sent(ranks: list[Seen]) -> None:
    assert ranks[1].values == [1.0, 2.0, 3.0, 4.0] * 2
    assert ranks[0].values == [1.0, 2.0] * 2, "the other direction has a line of its own"


def test_acknowledged_sends_are_let_go_at_once_and_the_rest_at_the_end(ranks: list[Seen]) -> None:
    assert ranks[0].under_way == [4, 1, 1, 0] * 2


def test_debug_fills_buffers_with_nan(ranks: list[Seen]) -> None:
    assert ranks[1].filled == [True, False]


def test_debug_catches_a_message_that_is_not_the_expected_one(ranks: list[Seen]) -> None:
    *wrong, right = ranks[1].caught
    assert right == ""
    assert len(wrong) == 6
    for text in wrong:
        assert text.startswith("rank 1 expected 0F1 of shape (2, 4) from rank 0, got [")
    assert len(set(wrong)) == 6, "and says what came instead"
