"""One-way point-to-point channels between pipeline ranks.

There is one channel per ordered pair of ranks that a program uses. Messages arrive in the order in
which they were sent, so they need no tags. Two kinds share an interface: process groups, and plain
queues if one process runs all pipeline ranks.

Each process-group channel has its own two-rank process group. A shared group would serialise both
directions (NCCL), and communicators made on first use are made in different orders on different
ranks and hang. At most one receive per channel is posted ahead;
:mod:`megapipe.engine.recv_prefetch` decides when.

On gloo a send completes only when the peer posts the receive, and only a wait shows completion. So
gloo sends are not polled. The lowering knows which sends must have arrived when a message comes
back (``acks``); their tensors are freed then, and all others at the end of the step. NCCL sends can
be polled, so their tensors are freed as soon as the sends complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.distributed import gloo
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.lower import channel_rounds
from megapipe.schedule.program import Action

Shape = tuple[int, ...]
MessageShape = Callable[[Op], Any]
"""Function that returns the shape of a message. If the message is packed, the shape is one
:class:`~megapipe.engine.packed.PackedTensor` for each of its tensors."""


class VersionedMessage(NamedTuple):
    """Name of a message, with the weight version that the producing operation has read."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int
    version: int

    def __str__(self) -> str:
        return f"{Op(*self[:4])}@{self.version}"


Name = Op | VersionedMessage
ExpectedMessages = Sequence[tuple[Name, Any]]
"""Messages of a channel in a step, in order: the name and the shape of each."""
Message = Any
"""A tensor, or a tuple of tensors if messages are packed."""


def message_of(action: Action) -> Op:
    """Return the name of the message that `action` sends or receives: the op that produced it."""
    return Op(action.kind, action.stage, action.microbatch, action.slice)


class SendChannel(Protocol):
    """The sender's end of a channel."""

    def send(self, message: Name, tensor: Message) -> None:
        """Send without blocking; the tensor must not be written afterwards."""

    def acknowledge(self, messages: int) -> None:
        """Record that the peer has received the `messages` oldest unacknowledged messages."""

    def finish(self) -> None:
        """End a step: wait for the unacknowledged sends, and free their tensors."""

    def suspend(self) -> int:
        """Wait for the unacknowledged sends, so that other programs can use the channel. Return the
        number of messages that are still to be acknowledged, for :meth:`restore`."""

    def restore(self, messages: int) -> None:
        """Continue after :meth:`suspend`, with `messages` messages still to be acknowledged."""


class RecvChannel(Protocol):
    """The receiver's end of a channel."""

    def expect(self, expected: ExpectedMessages) -> None:
        """Announce the next messages, which come after those announced before."""

    def post(self) -> None:
        """Start to receive the next announced message, if there is one and it has not started."""

    def arrived(self) -> bool:
        """Whether :meth:`receive` can return before this process runs another rank's program."""

    def receive(self) -> Message:
        """Wait for the next message, posted or not, and return it."""


class Channels(Protocol):
    """A pipeline rank's ends of its channels, by the peer's pipeline rank."""

    @property
    def outgoing(self) -> Mapping[int, SendChannel]: ...

    @property
    def incoming(self) -> Mapping[int, RecvChannel]: ...


class LocalChannel:
    """Both ends of a channel within a process; tensors are passed by reference."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Name, Tensor]] = deque()
        self.expected: deque[Name] = deque()

    def send(self, message: Name, tensor: Tensor) -> None:
        self.messages.append((message, tensor))

    def acknowledge(self, messages: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def suspend(self) -> int:
        return 0

    def restore(self, messages: int) -> None:
        pass

    def expect(self, expected: ExpectedMessages) -> None:
        self.expected.extend(message for message, _ in expected)

    def post(self) -> None:
        pass

    def arrived(self) -> bool:
        return bool(self.messages)

    def receive(self) -> Tensor:
        message, tensor = self.messages.popleft()
        expected = self.expected.popleft()
        assert message == expected, f"expected {expected}, got {message}"
        return tensor


class InProcessChannels:
    """Queues between pipeline ranks that share a process."""

    def __init__(
        self, outgoing: Mapping[int, LocalChannel], incoming: Mapping[int, LocalChannel]
    ) -> None:
        self.outgoing = outgoing
        self.incoming = incoming

    @classmethod
    def connect(cls, ranks: int) -> list[InProcessChannels]:
        """Return the channel ends of each pipeline rank, all connected."""
        queues = [[LocalChannel() for _ in range(ranks)] for _ in range(ranks)]
        return [
            cls(dict(enumerate(queues[rank])), {a: queues[a][rank] for a in range(ranks)})
            for rank in range(ranks)
        ]


class _Line:
    """One end of a two-rank process group."""

    def __init__(self, ends: Axis, device: torch.device, wire: torch.device) -> None:
        assert ends.group is not None
        self.group: Any = ends.group
        self.line = ends.line
        self.peer = 1 - ends.index
        self.ranks = ends.ranks
        self.device = device
        """Device on which the stages compute."""
        self.wire = wire
        """Device that messages are sent from and received on; for gloo it is the host."""
        self.moves = wire != device
        """Whether messages are copied between `wire` and `device`."""
        self.words, self.at = ends.line.words, ends.line.at
        """The journal's counters of exchanges, and the index of this group's counter in them."""
        self.limit: Sequence[timedelta] = gloo.LIMIT if wire.type == "cpu" else ()
        """Arguments of the wait for a message: gloo's timeout, or no argument."""


class _Outgoing(_Line):
    """A sender, which holds sent tensors, oldest first, until they are known to be received."""

    def __init__(self, ends: Axis, device: torch.device, wire: torch.device) -> None:
        super().__init__(ends, device, wire)
        self.in_flight: deque[tuple[Any, Tensor]] = deque()
        self.sent = 0
        """The journal's count of exchanges when the newest message was sent."""
        self.unacknowledged = 0
        """Number of sent messages that have not been acknowledged yet."""

    def send(self, message: Name, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        if self.moves:
            tensor = tensor.to(self.wire)
        self.words[self.at] = self.sent = self.words[self.at] + 1
        self.in_flight.append((self.group.send([tensor], self.peer, 0), tensor))
        self.unacknowledged += 1

    def acknowledge(self, messages: int) -> None:
        self.unacknowledged -= messages
        while len(self.in_flight) > self.unacknowledged:
            self.release()

    def release(self) -> Tensor:
        """Wait for the oldest message, and return its tensor to be freed."""
        oldest = self.sent - len(self.in_flight) + 1
        work, tensor = self.in_flight.popleft()
        self.line.wait(oldest, work.wait, *self.limit)
        return tensor

    def finish(self) -> None:
        self.acknowledge(self.unacknowledged)

    def suspend(self) -> int:
        expected = self.unacknowledged
        self.finish()
        return expected

    def restore(self, messages: int) -> None:
        self.unacknowledged += messages


class _PolledOutgoing(_Outgoing):
    """A sender on NCCL, which polls whether sends are complete."""

    def send(self, message: Name, tensor: Tensor) -> None:
        while self.in_flight and self.in_flight[0][0].is_completed():
            self.release()
        super().send(message, tensor)


class _Incoming(_Line):
    """A receiver with at most one posted receive."""

    def __init__(
        self, ends: Axis, device: torch.device, wire: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(ends, device, wire)
        self.dtype = dtype
        self.expected: deque[tuple[Name, Shape]] = deque()
        self.posted: tuple[Any, Tensor] | None = None

    def expect(self, expected: ExpectedMessages) -> None:
        self.expected.extend(expected)

    def post(self) -> None:
        if self.posted is not None or not self.expected:
            return
        buffer = torch.empty(self.expected[0][1], dtype=self.dtype, device=self.wire)
        self.posted = self.group.recv([buffer], self.peer, 0), buffer

    def arrived(self) -> bool:
        return True

    def receive(self) -> Tensor:
        if self.posted is None:
            self.post()
        assert self.posted is not None
        work, buffer = self.posted
        self.posted = None
        self.words[self.at] = number = self.words[self.at] + 1
        self.line.wait(number, work.wait, *self.limit)
        self.expected.popleft()
        return buffer.to(self.device) if self.moves else buffer


_HEADER = 12
"""Length of a debug header: kind, stage, micro-batch, slice, version, dtype, dims, shape."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8)


def _header(message: Name, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    version = message.version if isinstance(message, VersionedMessage) else 0
    values = [*message[:4], version, _DTYPES.index(dtype), len(shape), *shape]
    return torch.tensor(values + [0] * (_HEADER - len(values)), dtype=torch.int64)


def _spoil(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN; all-ones bytes are NaN in every floating-point type."""
    return tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))


class _DebugOutgoing(_Outgoing):
    """Sends a header and a copy of each message, and fills the copy with NaN before freeing it."""

    def send(self, message: Name, tensor: Tensor) -> None:
        header = _header(message, tensor.shape, tensor.dtype).to(self.wire)
        super().send(message, header)
        self.unacknowledged -= 1  # the header is acknowledged together with its message
        super().send(message, tensor.clone())

    def release(self) -> Tensor:
        super().release()
        tensor = super().release()
        return _spoil(tensor)

    def acknowledge(self, messages: int) -> None:
        self.unacknowledged -= messages
        while len(self.in_flight) > 2 * self.unacknowledged:
            self.release()


class _DebugIncoming(_Incoming):
    """Checks each header before it receives the message into a buffer filled with NaN."""

    def post(self) -> None:
        if self.posted is not None or not self.expected:
            return
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.wire)
        self.posted = self.group.recv([header], self.peer, 0), header

    def receive(self) -> Tensor:
        if self.posted is None:
            self.post()
        assert self.posted is not None
        work, header = self.posted
        self.posted = None
        self.line.wait(self.line.count(), work.wait, *self.limit)
        message, shape = self.expected.popleft()
        assert torch.equal(header.cpu(), _header(message, shape, self.dtype)), (
            f"rank {self.ranks[1 - self.peer]} expected {message} of shape {shape} from rank "
            f"{self.ranks[self.peer]}, got {header.tolist()}"
        )
        buffer = _spoil(torch.empty(shape, dtype=self.dtype, device=self.wire))
        work = self.group.recv([buffer], self.peer, 0)
        self.line.wait(self.line.count(), work.wait, *self.limit)
        return buffer.to(self.device)


class ProcessGroupChannels:
    """Channels over two-rank process groups, by the peer's pipeline rank.

    With `debug` every message has a header that is checked, and buffers are filled with NaN. NCCL
    runs at most `ctas` thread blocks for each channel.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        pairs: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        debug: bool = False,
        ctas: int = 1,
    ) -> None:
        wire = torch.device("cpu") if mesh.backend == "gloo" else mesh.device
        plain = _Outgoing if mesh.backend == "gloo" else _PolledOutgoing
        outgoing = _DebugOutgoing if debug else plain
        incoming = _DebugIncoming if debug else _Incoming
        self.outgoing: dict[int, _Outgoing] = {}
        self.incoming: dict[int, _Incoming] = {}
        for pair in (pair for level in channel_rounds(pairs) for pair in level):
            if mesh.pp.index not in pair:
                continue
            source, target = pair
            ends = mesh.group_of([mesh.pp.ranks[i] for i in sorted(pair)], ctas=ctas)
            # a first message connects the channel now, while all ranks follow the same rounds
            greeting = torch.zeros(1, device=wire)
            if source == mesh.pp.index:
                self.outgoing[target] = outgoing(ends, mesh.device, wire)
                self.outgoing[target].group.send([greeting], 1 - ends.index, 0).wait()
            else:
                self.incoming[source] = incoming(ends, mesh.device, wire, dtype)
                self.incoming[source].group.recv([greeting], 1 - ends.index, 0).wait()
