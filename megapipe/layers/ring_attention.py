"""Causal attention over queries and keys that are split over ranks, following a ring plan.

In every round a rank computes attention of one rank's queries with one rank's keys and values, as
the plan says. Meanwhile tensors for later rounds are in flight. A *bundle* is what is sent: one
rank's queries, or its keys and values. No rank has all keys, unless the plan gathers them, and
scores exist only inside a kernel. Ring Attention (2310.01889) is one such plan;
:mod:`megapipe.context.plans` has all plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.context.plan import MAX_IN_FLIGHT, Kind, Message, Plan, RankPlan, What
from megapipe.context.tensors import RingTensors
from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, reduce_scatter
from megapipe.distributed.exchange import PeerMessage, PendingExchange, start_exchange
from megapipe.layers.attention_tiles import AttentionTile, TileRows, heads_of, lse_of, rows_of
from megapipe.ops.packed_tile_kernels import PackedTileKernel
from megapipe.ops.tile_attention import TileKernel, accumulation, merge, output_along

Tensors = tuple[Tensor, ...]
Results = tuple[Tensor, Tensor]
"""Output [s, b, heads, d] and LSE [b, heads, s]."""
Bundle = tuple[Kind, int]
"""Key of a bundle: its kind (queries, or keys and values), and the rank that owns it."""


@dataclass(frozen=True)
class Ring:
    """Ranks over which positions are split during attention, their plans and kernels."""

    axis: Axis
    forward: Plan
    backward: Plan
    """Plan of the backward: the forward plan, or a plan that sends queries instead of keys."""
    gathers: bool
    """Whether all keys and values are all-gathered at once, instead of passed around the ring."""
    kernel: TileKernel
    packed: PackedTileKernel | None = None
    """Kernel that computes many tiles in one call, if attention ends at document boundaries."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, rows: TileRows, known: Results | None = None
) -> tuple[Tensor, Results]:
    """Compute this rank's attention: q [s, b, heads, d], k and v [t, b, groups, d] -> like q.

    Also return the detached output and the LSE. A recomputation passes them as `known`, and the
    same inputs: nothing is computed then, only the backward is prepared. All members of the ring
    must call this function, and its backward, in the same order.
    """
    y, lse = _RingAttention.apply(q, k, v, ring, rows, known)
    return y, (y.detach(), lse)


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ring: Ring,
        rows: TileRows,
        known: Results | None,
    ) -> Results:
        if known is None:
            total, lse = _Forward(ring, rows, q, k, v).run()
            known = total.to(q.dtype), lse
        out, lse = known
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.ring, ctx.rows = ring, rows
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = _Backward(ctx.ring, ctx.rows, q, k, v, grad, out, lse).run()
        return (*(total.to(q.dtype) for total in grads), None, None, None)


class _Run(ABC):
    """One rank's part of a plan, forward or backward.

    Queries are [s, b, heads, d] and keys [t, b, groups, d], also in messages. The host never waits
    for a message; only work queued on the GPU does.
    """

    backward: ClassVar[bool]
    """Whether the class runs the plan of the backward."""

    def __init__(
        self,
        ring: Ring,
        rows: TileRows,
        plan: Plan,
        parts: Sequence[RankPlan],
        own: Mapping[Kind, Tensors],
    ) -> None:
        self.ring, self.rows, self.plan = ring, rows, plan
        self._own = own
        self.me = ring.axis.index
        part = parts[self.me]
        self.pairs, self.messages = part.pairs, () if ring.gathers else part.messages
        self._bundles: dict[Bundle, Tensors] = {}
        self._arriving: dict[Message, tuple[Tensors, PendingExchange]] = {}
        self._sent: list[PendingExchange] = []
        self._needed = part.needed
        self._incoming: dict[tuple[str, Bundle], list[Message]] = defaultdict(list)
        for message in (each for exchange in self.messages for each in exchange):
            if message.target == self.me:
                self._incoming[message.what, (message.kind, message.owner)].append(message)

    def rounds(self) -> None:
        """Run all rounds of exchange and computation, but do not wait for partial results."""
        if self.ring.gathers:
            self._gather()
        for number in range(max(len(self.pairs), len(self.messages))):
            if not self.ring.gathers and self.ring.axis.group is not None:
                self._exchange(number)
            pair = self.pairs[number] if number < len(self.pairs) else None
            if pair is not None:
                self.compute(*pair)
            for bundle in [b for b in self._bundles if self._needed[b] <= number]:
                del self._bundles[bundle]

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for exchange in self._sent:
            exchange.sent()

    def bundle(self, kind: Kind, owner: int) -> Tensors:
        """Wait for the queries, or the keys and values, of rank `owner`; return their tensors."""
        key = kind, owner
        if owner == self.me:
            return self.own(kind)
        if key not in self._bundles:
            (self._bundles[key],) = self.arrived("bundle", key)
        return self._bundles[key]

    def arrived(self, what: str, bundle: Bundle) -> list[Tensors]:
        """Wait for the messages of kind `what` about a bundle; return their tensors in the plan's
        order of senders."""
        found = []
        order = [visit.rank for visit in self.plan.visits[bundle]]
        for message in sorted(self._incoming[what, bundle], key=lambda m: order.index(m.source)):
            tensors, exchange = self._arriving.pop(message)
            exchange.received()
            found.append(tensors)
        return found

    def _exchange(self, number: int) -> None:
        """Start the messages before round `number`, or after the last round."""
        messages = self.messages[number] if number < len(self.messages) else ()
        sends = [
            PeerMessage(tensor.contiguous(), message.target)
            for message in messages
            if message.source == self.me
            for tensor in self.content(message)
        ]
        while len(self._sent) >= MAX_IN_FLIGHT:
            self._sent.pop(0).sent()
        expected = {m: self.memory(m.what, m.kind) for m in messages if m.target == self.me}
        receives = [
            PeerMessage(tensor, message.source)
            for message, tensors in expected.items()
            for tensor in tensors
        ]
        exchange = start_exchange(sends, receives, self.ring.axis)
        self._sent.append(exchange)
        for message, tensors in expected.items():
            self._arriving[message] = tensors, exchange

    def _gather(self) -> None:
        """Gather keys and values of all ranks with one all-gather."""
        own = torch.stack(self.own("keys")).unsqueeze(0)  # [1, 2, t, b, groups, d]
        for owner, pair in enumerate(all_gather(own, self.ring.axis)):
            self._bundles["keys", owner] = (pair[0], pair[1])

    def calls(self, queries: int, keys: int) -> Iterator[AttentionTile]:
        """Yield the kernel calls for queries of rank `queries` with keys of rank `keys`."""
        return self.rows.calls(queries, keys, self.ring.kernel, self.ring.packed)

    def memory(self, what: What, kind: Kind) -> Tensors:
        """Allocate the tensors of a message, or of an accumulator of the same shapes."""
        (q, *_), (k, *_) = self._own["queries"], self._own["keys"]
        tensors = RingTensors(q.shape, k.shape).carried(what, kind, backward=self.backward)
        types = {False: q.dtype, True: accumulation(q.dtype)}
        return tuple(torch.empty(x.shape, dtype=types[x.main], device=q.device) for x in tensors)

    @abstractmethod
    def own(self, kind: Kind) -> Tensors:
        """Return this rank's queries, or its keys and values, as they are sent."""

    @abstractmethod
    def compute(self, queries: int, keys: int) -> None:
        """Compute attention of the queries of rank `queries` with the keys of rank `keys`."""

    @abstractmethod
    def content(self, message: Message) -> Tensors:
        """Return the tensors of a message that this rank sends."""


class _Forward(_Run):
    backward = False

    def __init__(self, ring: Ring, rows: TileRows, q: Tensor, k: Tensor, v: Tensor) -> None:
        own: dict[Kind, Tensors] = {"queries": (q,), "keys": (k, v)}
        super().__init__(ring, rows, ring.forward, ring.forward.forward_parts, own)
        self._results: dict[int, Tensors] = {}
        """Output [s, b, heads, d] and LSE [b, heads, s] so far, by the queries' owner."""

    def run(self) -> Tensors:
        """Return output and LSE of this rank's queries, in the accumulation type."""
        self.rounds()
        out, lse = self._result(self.me)
        for partial, its_lse in self.arrived("partial", ("queries", self.me)):
            merge(heads_of(out), lse, heads_of(partial), its_lse)
        self.finish()
        return out, lse

    def own(self, kind: Kind) -> Tensors:
        return self._own[kind]

    def compute(self, queries: int, keys: int) -> None:
        (q,), (k, v) = self.bundle("queries", queries), self.bundle("keys", keys)
        for call in self.calls(queries, keys):
            for entry, block, its_lse in call.forward(q, k, v):
                whole = block.shape[::2] == (q.shape[1], len(q))
                if queries not in self._results and whole:
                    wide = block.to(accumulation(q.dtype)).permute(2, 0, 1, 3)
                    self._results[queries] = wide, its_lse
                    continue
                out, lse = self._result(queries)
                merge(rows_of(out, entry.queries, entry), lse_of(lse, entry), block, its_lse)

    def _result(self, queries: int) -> Tensors:
        if queries not in self._results:
            out, lse = self.memory("partial", "queries")
            self._results[queries] = out.zero_(), lse.fill_(float("-inf"))  # no key seen yet
        return self._results[queries]

    def content(self, message: Message) -> Tensors:
        if message.what == "bundle":
            return self.bundle(message.kind, message.owner)
        self._result(message.owner)
        return self._results.pop(message.owner)


class _Backward(_Run):
    backward = True

    def __init__(
        self,
        ring: Ring,
        rows: TileRows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        own: dict[Kind, Tensors] = {"queries": (q, grad, lse), "keys": (k, v)}
        super().__init__(ring, rows, ring.backward, ring.backward.backward_parts, own)
        self._out = out
        self._grads: dict[Bundle, Tensors] = {}
        """Gradients of each bundle's tensors, (q,) or (k, v), summed so far, in the accumulation
        type."""
        self._of_all: Tensor | None = None
        """Gradients of all keys and values, if keys are gathered: [n, 2, t, b, groups, d]."""
        if ring.gathers:
            self._of_all = k.new_zeros((ring.axis.size, 2, *k.shape), dtype=accumulation(k.dtype))
            for owner, pair in enumerate(self._of_all):
                self._grads["keys", owner] = pair[0], pair[1]

    def run(self) -> Tensors:
        """Return the gradients of local queries, keys and values, in the accumulation type."""
        self.rounds()
        (q,) = self._sum("queries", self.me)
        if self._of_all is None:
            k, v = self._sum("keys", self.me)
        else:
            k, v = reduce_scatter(self._of_all, self.ring.axis)[0]
        self.finish()
        return q, k, v

    def own(self, kind: Kind) -> Tensors:
        """Return this rank's queries, or its keys and values, as they are sent. Queries are sent
        with the output's gradient, the LSE and, instead of the output, its dot products with the
        gradient, which are smaller (BurstAttention, 2403.09347)."""
        if kind == "queries":
            _, grad, _ = self._own[kind]
            high = accumulation(grad.dtype)
            return *self._own[kind], (self._out.to(high) * grad.to(high)).sum(-1)
        return self._own[kind]

    def compute(self, queries: int, keys: int) -> None:
        if queries == self.me:
            (q, grad, lse), out = self._own["queries"], self._out
        else:
            q, grad, lse, dots = self.bundle("queries", queries)
            out = output_along(grad, dots)
        k, v = self.bundle("keys", keys)
        grads = self._grads_of("queries", queries), self._grads_of("keys", keys)
        for call in self.calls(queries, keys):
            for entry, found in call.backward(grad, q, k, v, out, lse):
                row_ranges = (entry.queries, entry.keys, entry.keys)
                for total, here, part in zip(
                    (*grads[0], *grads[1]), row_ranges, found, strict=True
                ):
                    rows_of(total, here, entry).add_(part)

    def _grads_of(self, kind: Kind, owner: int) -> Tensors:
        if (kind, owner) not in self._grads:
            self._grads[kind, owner] = tuple(x.zero_() for x in self.memory("gradient", kind))
        return self._grads[kind, owner]

    def _sum(self, kind: Kind, owner: int) -> Tensors:
        """Return the sum of local and received gradients of a bundle of rank `owner`, and free
        both."""
        totals = self._grads_of(kind, owner)
        del self._grads[kind, owner]
        for parts in self.arrived("gradient", (kind, owner)):
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
        return totals

    def content(self, message: Message) -> Tensors:
        if message.what == "bundle":
            return self.bundle(message.kind, message.owner)
        return self._sum(message.kind, message.owner)
