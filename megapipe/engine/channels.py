"""One-way point-to-point channels between pipeline ranks.

There is one channel per ordered pair of ranks that a program uses. Messages arrive in the order
in which they were sent, so they need no tags. Two kinds share an interface: process groups, and
plain queues for the case that one process runs all pipeline ranks.

Each process-group channel has a two-rank process group of its own. A shared one would serialise
both directions (NCCL), and communicators made on first use are made in different orders on
different ranks and hang. At most one receive is posted ahead per channel.

On gloo a send completes only when the peer posts its receive, and asking whether it has completed
needs a wait. So sends are never waited for: the lowering knows which of them must have arrived
when a message comes back (``acks``), and those are let go then; the rest at the end of the step.
NCCL can be asked, so there a sent tensor is let go as soon as it is out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.mesh import Axis, ParallelMesh
from megapipe.schedule.ir import Op
from megapipe.schedule.lower import Action, Do, channel_rounds

Shape = tuple[int, ...]


def message_of(action: Action) -> Op:
    """What a message is: the op that produced it."""
    return Op(action.kind, action.stage, action.microbatch, action.slice)


class Channels(Protocol):
    """A pipeline rank's ends of its channels."""

    def start(self, actions: Iterable[Action]) -> None:
        """Begin a program: its receives, in order, are those of `actions`."""

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send without blocking; the tensor must not be written afterwards."""

    def arrived(self, action: Action) -> bool:
        """Whether :meth:`receive` would return without another rank's program going on."""

    def receive(self, action: Action) -> Tensor:
        """The message, in the order of its channel."""

    def finish(self) -> None:
        """End a program: every send has been received."""


class InProcessChannels:
    """Queues between pipeline ranks that live in one process; tensors are handed over."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], deque[tuple[Op, Tensor]]]) -> None:
        self.rank = rank
        self.queues = queues

    @classmethod
    def connect(cls, ranks: int) -> list[InProcessChannels]:
        """One end per pipeline rank, all connected."""
        queues = {(a, b): deque[tuple[Op, Tensor]]() for a in range(ranks) for b in range(ranks)}
        return [cls(rank, queues) for rank in range(ranks)]

    def start(self, actions: Iterable[Action]) -> None:
        pass

    def send(self, action: Action, tensor: Tensor) -> None:
        self.queues[self.rank, action.peer].append((message_of(action), tensor))

    def arrived(self, action: Action) -> bool:
        return bool(self.queues[action.peer, self.rank])

    def receive(self, action: Action) -> Tensor:
        message, tensor = self.queues[action.peer, self.rank].popleft()
        assert message == message_of(action), f"expected {message_of(action)}, got {message}"
        return tensor

    def finish(self) -> None:
        pass


class _Line:
    """One end of a channel: its process group, and the messages under way, oldest first.

    Tensors are held until their message is complete.
    """

    def __init__(self, ends: Axis) -> None:
        assert ends.group is not None
        self.group = ends.group
        self.peer = 1 - ends.index
        self.under_way: deque[tuple[list[Any], list[Tensor]]] = deque()

    def complete(self) -> list[Tensor]:
        """Wait for the oldest message under way."""
        works, tensors = self.under_way.popleft()
        for work in works:
            work.wait()
        return tensors


class _Incoming(_Line):
    def post(self, tensors: list[Tensor]) -> None:
        works = [dist.irecv(t, group=self.group, group_src=self.peer) for t in tensors]
        self.under_way.append((works, tensors))


class _Outgoing(_Line):
    """With `clobber` what was sent is filled with NaN when it is let go."""

    def __init__(self, ends: Axis, *, clobber: bool) -> None:
        super().__init__(ends)
        self.clobber = clobber
        self.unacknowledged = 0
        """Messages sent and not known from acknowledgements to be received."""

    def post(self, tensors: list[Tensor]) -> None:
        while self.under_way and all(work.is_completed() for work in self.under_way[0][0]):
            self._release()
        works = [dist.isend(t, group=self.group, group_dst=self.peer) for t in tensors]
        self.under_way.append((works, tensors))
        self.unacknowledged += 1

    def acknowledge(self, messages: int) -> None:
        """The oldest `messages` that were not acknowledged before have been received."""
        self.unacknowledged -= messages
        while len(self.under_way) > self.unacknowledged:
            self._release()

    def _release(self) -> None:
        for tensor in self.complete():
            if self.clobber and tensor.is_floating_point():
                tensor.fill_(float("nan"))


_HEADER = 12
"""Length of a debug header: kind, stage, micro-batch, slice, dtype, dims, shape."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def _header(action: Action, tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    values = [*message_of(action), _DTYPES.index(tensor.dtype), len(shape), *shape]
    return torch.tensor(values + [0] * (_HEADER - len(values)), dtype=torch.int64)


class ProcessGroupChannels:
    """Channels over two-rank process groups.

    `shape(microbatch, slice)` gives the shape of every message. With `debug` a header goes with
    each message and is checked on arrival, receive buffers are filled with NaN first, and what is
    sent is a copy that is filled with NaN when it is let go.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        pairs: Sequence[tuple[int, int]],
        *,
        shape: Callable[[int, int], Shape],
        dtype: torch.dtype,
        debug: bool = False,
    ) -> None:
        self.rank = mesh.pp.index
        self.device = mesh.device
        self.shape = shape
        self.dtype = dtype
        self.debug = debug
        self.wire = torch.device("cpu") if mesh.backend == "gloo" else mesh.device
        """Where messages are sent from and received: gloo's go through host memory."""
        self.outgoing: dict[int, _Outgoing] = {}
        self.incoming: dict[int, _Incoming] = {}
        for pair in (pair for level in channel_rounds(pairs) for pair in level):
            if self.rank not in pair:
                continue
            source, target = pair
            ends = mesh.group_of([mesh.pp.ranks[i] for i in sorted(pair)], channel=True)
            # a first message connects the channel now, while all ranks go by the same rounds
            greeting = [torch.zeros(1, device=self.wire)]
            if source == self.rank:
                self.outgoing[target] = _Outgoing(ends, clobber=debug)
                self.outgoing[target].post(greeting)
                self.outgoing[target].acknowledge(1)
            else:
                self.incoming[source] = _Incoming(ends)
                self.incoming[source].post(greeting)
                self.incoming[source].complete()
        self._expected: dict[int, deque[Action]] = {}

    def start(self, actions: Iterable[Action]) -> None:
        self._expected = {peer: deque() for peer in self.incoming}
        for action in actions:
            if action.do == Do.RECV:
                self._expected[action.peer].append(action)
        for peer in self.incoming:
            self._post_next(peer)

    def _post_next(self, peer: int) -> None:
        if not self._expected[peer]:
            return
        action = self._expected[peer].popleft()
        if self.debug:
            self.incoming[peer].post([torch.empty(_HEADER, dtype=torch.int64, device=self.wire)])
        else:
            self.incoming[peer].post([self._buffer(action)])

    def _buffer(self, action: Action) -> Tensor:
        shape = self.shape(action.microbatch, action.slice)
        return torch.empty(shape, dtype=self.dtype, device=self.wire)

    def send(self, action: Action, tensor: Tensor) -> None:
        tensor = tensor.contiguous().to(self.wire)
        if self.debug:
            header = _header(action, tensor).to(self.wire)
            self.outgoing[action.peer].post([header, tensor.clone()])
        else:
            self.outgoing[action.peer].post([tensor])

    def arrived(self, action: Action) -> bool:
        return True

    def receive(self, action: Action) -> Tensor:
        line = self.incoming[action.peer]
        (tensor,) = line.complete()
        if self.debug:
            header, tensor = tensor, self._buffer(action).fill_(float("nan"))
            assert torch.equal(header.cpu(), _header(action, tensor)), (
                f"rank {self.rank} expected {message_of(action)} of shape {tuple(tensor.shape)} "
                f"from rank {action.peer}, got {header.tolist()}"
            )
            line.post([tensor])
            line.complete()
        self._post_next(action.peer)
        if action.acks:
            self.outgoing[action.peer].acknowledge(action.acks)
        return tensor.to(self.device)

    def finish(self) -> None:
        for line in self.outgoing.values():
            line.acknowledge(line.unacknowledged)
