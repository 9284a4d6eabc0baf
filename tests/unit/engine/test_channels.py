"""One-way channels: order, acknowledgements, and what the debug mode catches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megapipe.distributed.mesh import Axis
from megapipe.engine.channels import (
    InProcessChannels,
    ProcessGroupChannels,
    _Outgoing,
    _PolledOutgoing,
    _spoil,
    message_of,
)
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.program import Action, ActionKind
from megapipe.watch.journal import CommCounter, Journal
from tests.parity.messages import ANSWERS, FORWARD, expected, tensor_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_let_go_in_debug_mode_is_nan_in_every_type(dtype: torch.dtype) -> None:
    """So it is where messages of several tensors are bytes."""
    assert _spoil(torch.zeros(4, dtype=dtype)).isnan().all()
    assert _spoil(torch.zeros(32, dtype=torch.uint8)).view(dtype).isnan().all()


def test_a_message_is_named_by_what_made_it() -> None:
    sent = Action(ActionKind.SEND, Kind.I, 3, 2, 1, peer=1)
    received = Action(ActionKind.RECV, Kind.I, 3, 2, 1, peer=0, acks=2)
    assert message_of(sent) == message_of(received) == Op(Kind.I, 3, 2, 1)


def test_queues_in_one_process_keep_the_order_and_hand_over_the_tensor() -> None:
    first, second = InProcessChannels.connect(2)
    there, back = first.outgoing[1], second.outgoing[0]
    tensors = [torch.zeros(i) for i in range(4)]
    for _ in range(2):
        second.incoming[0].expect(expected(FORWARD))
        assert not second.incoming[0].arrived()
        for message, tensor in zip(FORWARD, tensors, strict=True):
            there.send(message, tensor)
        assert not first.incoming[1].arrived(), "one way"
        for tensor in tensors:
            assert second.incoming[0].arrived()
            assert second.incoming[0].receive() is tensor
        assert not second.incoming[0].arrived()
        there.finish()
    first.incoming[1].expect(expected(ANSWERS[:1]))
    back.send(ANSWERS[0], tensors[0])
    assert first.incoming[1].receive() is tensors[0]


def test_pipeline_ranks_in_one_process_have_a_queue_for_each_pair() -> None:
    ends = InProcessChannels.connect(3)
    for a in range(3):
        for b in range(3):
            assert ends[a].outgoing[b] is ends[b].incoming[a]
    assert len({id(queue) for end in ends for queue in end.outgoing.values()}) == 9


def test_a_message_out_of_order_is_noticed_in_one_process() -> None:
    sender, receiver = InProcessChannels.connect(2)
    receiver.incoming[0].expect(expected(FORWARD))
    sender.outgoing[1].send(FORWARD[1], torch.zeros(1))
    with pytest.raises(AssertionError, match="expected 0F0, got 0F1"):
        receiver.incoming[0].receive()


class FakeWork:
    """A send whose completion is decided by hand."""

    def __init__(self) -> None:
        self.completed = False
        self.waits = 0

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.waits += 1


class FakeGroup:
    """Two ranks, the other of which never answers."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        assert (peer, tag) == (1, 0)
        self.works.append(FakeWork())
        return self.works[-1]

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self.send(tensors, peer, tag)


def fake_line(kind: type[_Outgoing]) -> tuple[_Outgoing, list[FakeWork]]:
    group: Any = FakeGroup()
    cpu = torch.device("cpu")
    return kind(Axis(2, 0, (0, 1), group), cpu, cpu), group.works


@pytest.mark.parametrize("kind", [_Outgoing, _PolledOutgoing])
def test_a_send_is_not_waited_for_before_it_is_acknowledged(kind: type[_Outgoing]) -> None:
    line, works = fake_line(kind)
    for message in FORWARD:
        line.send(message, tensor_of(message))
    assert [work.waits for work in works] == [0, 0, 0, 0]
    line.acknowledge(1)
    line.acknowledge(2)
    assert [work.waits for work in works] == [1, 1, 1, 0]
    line.finish()
    assert [work.waits for work in works] == [1, 1, 1, 1]
    assert not line.in_flight


class FakeLine(CommCounter):
    """A channel that notes which exchanges are waited for."""

    def __init__(self) -> None:
        super().__init__(Journal(), 0)
        self.waited: list[int] = []

    def wait(self, exchange: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.waited.append(exchange)
        return call(*args, **kwargs)


@pytest.mark.parametrize("kind", [_Outgoing, _PolledOutgoing])
def test_the_journal_names_the_message_that_is_waited_for(kind: type[_Outgoing]) -> None:
    line, works = fake_line(kind)
    journal = line.line = FakeLine()
    for message in FORWARD[:3]:
        line.send(message, tensor_of(message))
    line.acknowledge(2)
    assert journal.waited == [1, 2]
    line.send(FORWARD[3], tensor_of(FORWARD[3]))
    line.finish()
    assert journal.waited == [1, 2, 3, 4]
    assert [work.waits for work in works] == [1, 1, 1, 1]


def test_where_sends_can_be_asked_they_are_let_go_as_they_complete() -> None:
    line, works = fake_line(_PolledOutgoing)
    for message in FORWARD[:3]:
        line.send(message, tensor_of(message))
    works[0].completed = works[2].completed = True
    line.send(FORWARD[3], tensor_of(FORWARD[3]))
    assert [work.waits for work in works] == [1, 0, 0, 0], "the oldest first, in order"
    assert len(line.in_flight) == 3
    line.acknowledge(2)
    assert [work.waits for work in works] == [1, 1, 0, 0], "one of the two was let go before"
    line.finish()
    assert [work.waits for work in works] == [1, 1, 1, 1]


def test_without_asking_a_completed_send_is_kept() -> None:
    line, works = fake_line(_Outgoing)
    line.send(FORWARD[0], tensor_of(FORWARD[0]))
    works[0].completed = True
    line.send(FORWARD[1], tensor_of(FORWARD[1]))
    assert len(line.in_flight) == 2


def test_what_is_set_aside_is_acknowledged_to_who_takes_it_back() -> None:
    """Messages of a program that pauses are not counted among those of another."""
    line, works = fake_line(_Outgoing)
    for message in FORWARD[:2]:
        line.send(message, tensor_of(message))
    assert line.suspend() == 2
    assert [work.waits for work in works] == [1, 1]
    line.send(FORWARD[2], tensor_of(FORWARD[2]))
    line.finish()
    line.restore(2)
    line.send(FORWARD[3], tensor_of(FORWARD[3]))
    line.acknowledge(2)
    assert [work.waits for work in works] == [1, 1, 1, 0], "of the first two"
    line.acknowledge(1)
    assert [work.waits for work in works] == [1, 1, 1, 1]


@pytest.mark.parametrize(("backend", "wire"), [("gloo", "cpu"), ("nccl", "meta")])
def test_messages_of_a_device_go_through_the_host_on_gloo_alone(backend: str, wire: str) -> None:
    meta = torch.device("meta")
    ends = Axis(2, 0, (0, 1), cast(Any, FakeGroup()))
    mesh: Any = SimpleNamespace(backend=backend, device=meta, pp=ends)
    mesh.group_of = lambda ranks, ctas: ends
    for debug in (False, True):
        channels = ProcessGroupChannels(mesh, [(0, 1), (1, 0)], dtype=torch.float32, debug=debug)
        there, back = channels.outgoing[1], channels.incoming[1]
        assert (there.device, there.wire.type) == (meta, wire)
        assert (back.device, back.wire.type) == (meta, wire)
        assert isinstance(there, _PolledOutgoing) == (backend == "nccl" and not debug)
    line = ProcessGroupChannels(mesh, [(1, 0)], dtype=torch.float32).incoming[1]
    line.expect(expected(FORWARD[:1]))
    line.post()
    assert line.posted is not None
    posted = line.posted[1]
    received = line.receive()
    assert (posted.device.type, received.device) == (wire, meta)
    assert (received is posted) == (backend == "nccl")
