"""One bucket's path through a step: reduce gradients, update a shard, all-gather weights.

The path is the same at every ZeRO stage. ZeRO stages differ only in the bucket's axes, and in when
its gradients and weights have memory (:mod:`megapipe.layout.buckets`). Communication is started and
awaited in separate calls, so that it overlaps with the pipeline's computation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.distributed.collectives import Wait, all_reduce, done, start_all_gather
from megapipe.distributed.mesh import Axis
from megapipe.optim.buffers import Bucket, ParamRange
from megapipe.optim.norm import squared_norm, zero_if_finite
from megapipe.optim.reduction import Reduction
from megapipe.optim.state_store import StatePolicy, StateStore, copy_into


class Shard:
    """The part [start, stop) of a bucket that this rank updates.

    [own_start, own_stop) is the part of the shard that this rank counts in the norm and writes to
    checkpoints: an equal part if several ranks update the same shard, else all of it. `tp` is the
    axis of the ranks that hold other parts of the same tensors: tp, or etp for parameters split
    over ep. `states` names the rule's states, which are stored as `policy` says; with `velocity`,
    the velocity of the weights is stored too. If the other end of `link` updates the bucket, this
    rank has only the weights, and an empty shard.
    """

    def __init__(
        self,
        bucket: Bucket,
        tp: Axis,
        states: Sequence[str] = (),
        policy: StatePolicy | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        velocity: bool = False,
    ) -> None:
        self.bucket = bucket
        self.axis = bucket.shard
        self.tp = tp
        self.reduce_dtype = reduce_dtype
        self.link = bucket.link
        self.updates = self.link is None or self.link.updates
        """Whether this rank updates its shard; otherwise [start, stop) is empty."""
        length = bucket.numel // bucket.shard.size if self.updates else 0
        self.start = length * bucket.shard.index
        self.stop = self.start + length
        share = length // bucket.replicate.size
        self.own_start = self.start + share * bucket.replicate.index
        self.own_stop = self.own_start + share
        if bucket.sharded_weights:
            weights = bucket.weights.new_zeros(length)
        else:
            weights = bucket.weights[self.start : self.stop]
        self.weights = weights
        """Weights of this rank's shard, in the model dtype."""
        origin = bucket.start + self.start
        self.store = StateStore(
            weights, states, policy, bucket=bucket.index, start=origin, velocity=velocity
        )
        self.older: Sequence[Tensor] = ()
        """Older versions of the bucket's weights that are still read, the newest first."""
        self.grad = torch.empty(0)
        """Sum of the gradients of [start, stop) over the global batch, valid from `finish_reduce`
        to the next step."""
        self._parts = False
        """Whether `grad` already holds the sum of earlier reductions of the step."""
        self._reduction: Reduction | None = None
        self._gathered: Wait = done
        self._users = 0
        """Number of stages that need the gathered weights now."""
        self.segments = [
            s._replace(start=max(s.start, self.start), stop=min(s.stop, self.stop))
            for s in bucket.segments()
            if max(s.start, self.start) < min(s.stop, self.stop)
        ]

    def write_weights_into(self, whole: Tensor) -> None:
        """Make later updates write weights into `whole`, a flat array of the bucket's size. Masters
        must have separate memory."""
        assert self.store.own_master, "these weights are their own master weights"
        self.weights = self.store.weights = whole[self.start : self.stop]

    def local(self, start: int, stop: int) -> slice:
        """Return the range [start, stop) of the bucket as a slice of the shard's arrays."""
        return slice(start - self.start, stop - self.start)

    def own_range(self, entry: ParamRange) -> slice:
        """Return the part of a parameter that is in the shard, as a slice of the shard's arrays."""
        return self.local(max(entry.start, self.start), min(entry.stop, self.stop))

    def zero_grad(self) -> None:
        """Begin a step: zero the bucket's gradients, and free the sum of the last step."""
        self._reduction = None
        if self.link is not None:
            self.link.await_sent()
        self.bucket.zero_grad()
        self.grad = self.grad.new_empty(0)
        self._parts = False

    def start_reduce(self) -> None:
        """Start the reduction of the bucket's gradients."""
        bucket = self.bucket
        assert self._reduction is None, f"bucket {bucket.index} is already being reduced"
        bucket.collect_early()
        bucket.sum_tied_grads()
        self._sum_parts()
        self._reduction = Reduction(
            bucket.grads[0], bucket.shard, bucket.replicate, self.reduce_dtype
        )

    def advance_reduction(self) -> None:
        """Start the second sum of a reduction in flight, between shard groups, if it has one."""
        if self._reduction is not None:
            self._reduction.advance()

    def expect_gradients(self) -> None:
        """Post the receive of the gradients that the link's other end sends next, if any."""
        if self.link is not None and self.link.updates:
            self.link.expect_gradients(self.bucket.grads[0][self.start : self.stop])

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if any, and add its sum to `grad`."""
        if self._reduction is None:
            return
        piece = self._reduction.wait()
        self._reduction = None
        if self.link is not None and self.link.updates:
            self.link.add_gradients(piece)
        elif self.link is not None:
            self.link.send_gradients(piece)
            piece = piece[:0]
        if self.bucket.sharded_grads:
            self.bucket.free_grads()
            piece = self.grad.add_(piece) if self._parts else piece
            self._parts = True
        self.grad = piece

    def _sum_parts(self) -> None:
        """Sum partial gradients over tp in one all-reduce. Each rank computed its summand from its
        positions or heads only."""
        bucket = self.bucket
        parts = [
            bucket.view(bucket.grads[0], entry)
            for entry in bucket.entries
            if entry.spec.grad_is_partial
        ]
        if parts:
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, self.tp)
            for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(total.view_as(part))

    def own_square(self) -> Tensor:
        """Return the squared norm, fp64 [], of the gradients that this rank counts; NaN if any
        gradient in the shard, counted here or on another rank, is not finite."""
        total = torch.zeros((), dtype=torch.float64, device=self.grad.device)
        copies = []
        for start, stop, counted in ((s.start, s.stop, s.is_primary) for s in self.segments):
            a, b = max(start, self.own_start), min(stop, self.own_stop)
            if a < b and counted:
                total += squared_norm(self.grad[self.local(a, b)])
            else:
                a = b = stop
            copies += [self.grad[self.local(x, y)] for x, y in ((start, a), (b, stop)) if x < y]
        return total + zero_if_finite(copies) if copies else total

    def start_gather(self) -> None:
        """Start the all-gather of weights over the shard axis, or their receive over the link."""
        bucket, link = self.bucket, self.link
        assert self._gathered is done, f"bucket {bucket.index} is already being gathered"
        whole = bucket.alloc_weights() if bucket.sharded_weights else bucket.weights
        if not self.updates:
            assert link is not None
            link.await_sent()
            self._gathered = link.receive_weights(whole)
            return
        gathered = self._gathered = start_all_gather(whole, self.weights, bucket.shard)
        if link is not None:

            def gathered_and_sent() -> None:
                gathered()
                link.send_weights(whole)

            self._gathered = gathered_and_sent

    def await_readers(self) -> None:
        """Wait until no all-gather or send reads this rank's weights, which are about to change."""
        self.await_weights()
        if self.link is not None:
            self.link.await_sent()

    def await_weights(self) -> None:
        """Wait until all weights of the bucket are gathered."""
        self._gathered()
        self._gathered = done

    def unshard(self) -> None:
        """Start the all-gather of a stage's weights, unless another stage has gathered them."""
        self._users += 1
        if self._users == 1 and self.bucket.sharded_weights:
            self.start_gather()

    def reshard(self) -> None:
        """End a stage's use of the weights. Free sharded weights if no stage uses them any more."""
        self._users -= 1
        if self._users == 0 and self.bucket.sharded_weights:
            self.await_weights()
            self.bucket.free_weights()

    def start_gather_after_update(self) -> None:
        """Start the all-gather of the updated weights (ZeRO-3 gathers them on demand)."""
        if not self.bucket.sharded_weights:
            self.start_gather()

    def set_weights(self, entry: ParamRange, values: Tensor) -> None:
        """Set weights and master of a parameter to `values`, its local region in full precision."""
        if not self.bucket.sharded_weights:
            copy_into(self.bucket.view(self.bucket.weights, entry), values)
        self.set_state("model", entry, values)

    def weights_in_place(self, entry: ParamRange) -> Tensor | None:
        """Return a parameter's flat weights. If a caller writes them in place, :meth:`set_weights`
        copies nothing. None unless they are masters too and in host memory."""
        own = self.store.in_place("model", 0, 0)
        if own is None or self.bucket.sharded_weights:
            return None
        return self.bucket.weights[entry.start : entry.stop]

    def state_in_place(self, name: str, entry: ParamRange) -> Tensor | None:
        """Return a parameter's flat state. If a caller writes it in place, :meth:`set_state` copies
        nothing. None unless all of it is in this shard and in host memory."""
        if not self.start <= entry.start <= entry.stop <= self.stop:
            return None
        return self.store.in_place(name, entry.start - self.start, entry.stop - self.start)

    def set_state(self, name: str, entry: ParamRange, values: Tensor) -> None:
        """Set this shard's part of a parameter's state; `values` cover the whole local region."""
        a, b = max(entry.start, self.start), min(entry.stop, self.stop)
        if a < b:
            flat = values.reshape(-1)[a - entry.start : b - entry.start]
            self.store.write(name, a - self.start, b - self.start, flat)
