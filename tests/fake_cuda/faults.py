"""Faults that only a GPU would show, seeded one at a time in the package.

Each fault patches one place on every rank. With it go a case in which that place matters, and what
the checks should report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.distributed import collectives
from megapipe.distributed.collectives import Wait, done
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine import channels
from megapipe.layers import offload as activations
from megapipe.optim import buffers, state_store
from megapipe.optim import shard as shards
from megapipe.optim import state_offload as states
from tests.parity.ranks import Case

Patch = AbstractContextManager[Any]
SMALL = Case(steps=2, layers=2, m=2)
PIPELINE = replace(SMALL, pp=2, m=4, clip=None)
DATA = replace(SMALL, dp=2)
SHARDED = replace(DATA, zero=3, chunks=2, schedule="interleaved_1f1b", tied=False)
ACTIVATIONS = replace(SMALL, activations="offload", dtype="fp32")
STATES = replace(SMALL, offload="host", dtype="bf16", state_dtype="bf16")


@dataclass(frozen=True)
class Fault:
    """A patch, the case in which it does harm, and a pattern of what is noticed."""

    patch: Callable[[], Patch]
    case: Case
    noticed: str
    patience_s: float
    """Seconds for which ranks wait for each other."""

    @property
    def name(self) -> str:
        return self.patch.__name__


FAULTS: list[Fault] = []


def seeded(
    case: Case, noticed: str, patience_s: float = 8.0
) -> Callable[[Callable[[], Patch]], Callable[[], Patch]]:
    """Add the patch that the decorated function makes to the list."""

    def add(patch: Callable[[], Patch]) -> Callable[[], Patch]:
        FAULTS.append(Fault(patch, case, noticed, patience_s))
        return patch

    return add


def never_waits(module: Any, name: str) -> Patch:
    """Patch a function that starts a collective so that its wait does nothing.

    The started collective is kept alive, so the missing wait is the only fault.
    """
    start: Callable[..., Any] = getattr(module, name)
    begun: list[Any] = []

    def wrong(*args: Any, **options: Any) -> Any:
        result = start(*args, **options)
        begun.append(result)
        return done if callable(result) else (result[0], done)

    return mock.patch.object(module, name, wrong)


def leaves_out(owner: Any, name: str) -> Patch:
    """Patch a method so that it does nothing."""
    return mock.patch.object(owner, name, return_value=None)


# -- collectives and messages


@seeded(DATA, "reads what NCCL's reduce_scatter .* has not waited")
def reduced_gradients_not_waited_for() -> Patch:
    from megapipe.optim import reduction

    return never_waits(reduction, "start_reduce_scatter")


@seeded(SHARDED, "reads what NCCL's all_gather .* has not waited")
def gathered_weights_not_waited_for() -> Patch:
    return never_waits(shards, "start_all_gather")


@seeded(replace(SMALL, tp=2), "reads what NCCL's all_reduce .* has not waited")
def partial_sums_not_waited_for() -> Patch:
    from megapipe.layers import linear

    return never_waits(linear, "start_all_reduce")


@seeded(replace(SMALL, cp=2), "reads what NCCL's recv .* has not waited")
def keys_of_a_ring_not_waited_for() -> Patch:
    from megapipe.layers import ring_attention

    start = ring_attention.start_exchange

    def wrong(*args: Any) -> Any:
        return start(*args)._replace(received=lambda: None)

    return mock.patch.object(ring_attention, "start_exchange", wrong)


@seeded(replace(SMALL, cp=2, context="ulysses"), "reads what NCCL's all_to_all .* has not waited")
def other_heads_not_waited_for() -> Patch:
    from megapipe.layers import ulysses_all_to_all

    return never_waits(ulysses_all_to_all, "start_all_to_all")


@seeded(
    replace(DATA, ep=2, moe="top 2", placement="changing"),
    "reads what NCCL's all_to_all .* has not waited",
)
def copies_of_experts_not_waited_for() -> Patch:
    from megapipe.layers.moe import replicas

    return never_waits(replicas, "start_all_to_all")


@seeded(PIPELINE, "reads what NCCL's recv .* has not waited")
def message_not_waited_for() -> Patch:
    """Return the buffer as soon as the receive is posted; wait for it only at the end."""
    receive = channels._Incoming.receive

    def wrong(self: channels._Incoming) -> Tensor:
        if self.posted is None:
            self.post()
        assert self.posted is not None
        work, buffer = self.posted
        late.append(work)
        self.posted = mock.Mock(), buffer
        return receive(self)

    late: list[Any] = []
    return mock.patch.object(channels._Incoming, "receive", wrong)


@seeded(PIPELINE, "writes what NCCL's send .* reads, and has not waited")
def sent_tensor_written_to() -> Patch:
    send = channels._Outgoing.send

    def wrong(self: channels._Outgoing, message: Any, tensor: Tensor) -> None:
        send(self, message, tensor)
        self.in_flight[-1][1].add_(0)

    return mock.patch.object(channels._Outgoing, "send", wrong)


@seeded(PIPELINE, "NCCL takes contiguous tensors")
def message_of_another_shape_in_memory() -> Patch:
    send = channels._Outgoing.send

    def wrong(self: channels._Outgoing, message: Any, tensor: Tensor) -> None:
        odd = tensor.new_empty(*tensor.shape, 2)[..., 0].copy_(tensor)
        with mock.patch.object(Tensor, "contiguous", lambda self: self):
            send(self, message, odd)

    return mock.patch.object(channels._Outgoing, "send", wrong)


@seeded(PIPELINE, "the current device is cuda:1")
def buffers_on_the_first_device() -> Patch:
    empty = torch.empty

    def wrong(*args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(device, torch.device) and device.type == "cuda":
            device = torch.device("cuda", 0)
        return empty(*args, device=device, **options)

    return mock.patch.object(channels.torch, "empty", wrong)


@seeded(replace(SMALL, tp=2), "NCCL takes tensors of a GPU, not of cpu")
def numbers_of_the_host_over_nccl() -> Patch:
    make = ParallelMesh.__init__

    def wrong(self: ParallelMesh, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._host["tp"] = self.tp

    return mock.patch.object(ParallelMesh, "__init__", wrong)


@seeded(SHARDED, "given back while NCCL's stream|memory that has been given back")
def gradients_released_while_they_are_reduced() -> Patch:
    start = shards.Shard.start_reduce

    def wrong(self: shards.Shard) -> None:
        start(self)
        self.bucket.free_grads()

    return mock.patch.object(shards.Shard, "start_reduce", wrong)


@seeded(DATA, "writes what NCCL's all_gather .* reads|what it was given was changed")
def weights_updated_while_they_are_gathered() -> Patch:
    publish = shards.Shard.start_gather_after_update

    def wrong(self: shards.Shard) -> None:
        publish(self)
        self.weights.mul_(1.0)

    return mock.patch.object(shards.Shard, "start_gather_after_update", wrong)


@seeded(PIPELINE, "[Tt]imed out|did not end in time", patience_s=3.0)
def channels_connected_in_another_order() -> Patch:
    rounds = channels.channel_rounds

    def wrong(pairs: Sequence[tuple[int, int]]) -> Any:
        found = list(rounds(pairs))
        return found[:: -1 if torch.cuda.current_device() else 1]

    return mock.patch.object(channels, "channel_rounds", wrong)


@seeded(DATA, "number . is .*all_reduce float32 4 sum .*on (another member|the other)")
def another_collective_on_one_rank() -> Patch:
    begin = shards.Shard.start_reduce

    def wrong(self: shards.Shard) -> None:
        axis = self.bucket.shard
        start: Callable[..., Wait] = collectives.start_all_reduce
        if axis.index == 1:
            start(torch.zeros(4, device=self.bucket.grads[0].device), axis)()
        begin(self)
        if axis.index == 0:
            start(torch.zeros(4, device=self.bucket.grads[0].device), axis)()

    return mock.patch.object(shards.Shard, "start_reduce", wrong)


# -- streams of copies


@contextmanager
def left_out_within(owner: Any, name: str, within: tuple[Any, str]) -> Iterator[None]:
    """Leave out what `name` does while the other function runs."""
    place, outer = within
    function = getattr(place, outer)

    def wrong(*args: Any, **options: Any) -> Any:
        with leaves_out(owner, name):
            return function(*args, **options)

    with mock.patch.object(place, outer, wrong):
        yield


@seeded(ACTIVATIONS, "copy to the host .* reads what .* has not waited")
def activations_leave_before_they_are_computed() -> Patch:
    return left_out_within(torch.cuda.Stream, "wait_stream", (activations._Copy, "__init__"))


@seeded(ACTIVATIONS, "reads what copy from the host .* has not waited")
def activations_used_before_they_are_back() -> Patch:
    take = activations._Copy.take

    def wrong(self: activations._Copy) -> torch.UntypedStorage:
        self.fetch()
        self.arrived = None
        return take(self)

    return mock.patch.object(activations._Copy, "take", wrong)


@seeded(ACTIVATIONS, "given back while stream . of cuda:0 may still use it .copy to the host")
def activations_freed_before_they_have_left() -> Patch:
    return left_out_within(Tensor, "record_stream", (activations._Copy, "__init__"))


@seeded(ACTIVATIONS, "what an earlier use of the memory on the default stream .* has not waited")
def activations_fetched_into_memory_that_is_in_use() -> Patch:
    return left_out_within(torch.cuda.Stream, "wait_stream", (activations._Copy, "fetch"))


@seeded(STATES, "reads what copy from the host .* has not waited")
def states_used_before_they_are_here() -> Patch:
    return leaves_out(states.CopyStream, "wait_event")


@seeded(STATES, "has not waited")
def copies_that_follow_nothing() -> Patch:
    return leaves_out(states.CopyStream, "wait_compute")


@seeded(STATES, "given back while stream|given back while the default stream|has not waited")
def windows_freed_while_copies_run() -> Patch:
    return leaves_out(states.CopyStream, "compute_waits")


@seeded(STATES, "some state is nan|the padding is not zero")
def states_read_before_they_are_back() -> Patch:
    """Let the host read states before they are back, as for a checkpoint."""
    return leaves_out(state_store.StateStore, "_settle")


@seeded(replace(SMALL, offload="host"), "two devices|same device")
def gradients_on_the_host() -> Patch:
    zero_grad = buffers.Bucket.zero_grad

    def wrong(self: buffers.Bucket) -> None:
        zero_grad(self)
        self.grads[0] = self.grads[0].cpu()

    return mock.patch.object(buffers.Bucket, "zero_grad", wrong)
