"""One bucket's way through a step: gradients are summed, a slice updated, weights gathered.

The way is the same at every ZeRO stage; only the axes of the bucket differ, and when its gradients
and weights have memory (:mod:`megapipe.layout.buckets`). Communication is started and awaited in
separate calls, so that the pipeline's computation runs beside it.
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
    checkpoints: an equal share where several ranks update the same shard, else all of it. `tp` are
    the ranks that hold other parts of the same tensors; of what is split over ep those of etp.
    `states` are those of the rule, kept as `policy` says, with a `velocity` of the weights or
    without. Of a bucket whose `link` leads to those who update it the rank has no part, but a copy
    of the weights.
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
        """Whether this rank updates a part; otherwise [start, stop) is empty."""
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
        """This rank's slice in the model dtype."""
        origin = bucket.start + self.start
        self.store = StateStore(
            weights, states, policy, bucket=bucket.index, start=origin, velocity=velocity
        )
        self.older: Sequence[Tensor] = ()
        """Older versions of the bucket's weights that are still read, the newest first."""
        self.grad = torch.empty(0)
        """Sum of the gradients of [start, stop) over the global batch, from `finish_reduce` to
        the next step."""
        self._parts = False
        """Whether `grad` holds the sum of some of the step's reductions."""
        self._reduction: Reduction | None = None
        self._gathered: Wait = done
        self._users = 0
        """Stages that need the whole weights now."""
        self.segments = [
            s._replace(start=max(s.start, self.start), stop=min(s.stop, self.stop))
            for s in bucket.segments()
            if max(s.start, self.start) < min(s.stop, self.stop)
        ]

    def write_weights_into(self, whole: Tensor) -> None:
        """Let the next update write its weights into `whole`, a flat array of the bucket's size;
        the masters have memory of their own."""
        assert self.store.own_master, "the masters of these weights are no others"
        self.weights = self.store.weights = whole[self.start : self.stop]

    def local(self, start: int, stop: int) -> slice:
        """The range [start, stop) of the bucket as an index of the shard's arrays."""
        return slice(start - self.start, stop - self.start)

    def own_range(self, entry: ParamRange) -> slice:
        """The part of a parameter that is in the shard, as an index of its arrays."""
        return self.local(max(entry.start, self.start), min(entry.stop, self.stop))

    def zero_grad(self) -> None:
        """Begin a step: zero the gradients, and free the sum of the last step's."""
        self._reduction = None
        if self.link is not None:
            self.link.await_sent()
        self.bucket.zero_grad()
        self.grad = self.grad.new_empty(0)
        self._parts = False

    def start_reduce(self) -> None:
        """Send off the gradients that are in the bucket."""
        bucket = self.bucket
        assert self._reduction is None, f"bucket {bucket.index} is being reduced already"
        bucket.collect_early()
        bucket.sum_tied_grads()
        self._sum_parts()
        self._reduction = Reduction(
            bucket.grads[0], bucket.shard, bucket.replicate, self.reduce_dtype
        )

    def advance_reduction(self) -> None:
        """Begin the sum between shard groups, if any, of the reduction that was sent off."""
        if self._reduction is not None:
            self._reduction.advance()

    def expect_gradients(self) -> None:
        """Begin to receive what the other end of the link adds to the next gradients, if any."""
        if self.link is not None and self.link.updates:
            self.link.expect_gradients(self.bucket.grads[0][self.start : self.stop])

    def finish_reduce(self) -> None:
        """Wait for the reduction that was sent off, if any, and take its sum into `grad`."""
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
        """All-reduce over tp, once, the gradients of this rank's positions or heads alone."""
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
        """Squared norm, fp64 [], of what this rank counts of the gradients in its own range; NaN
        where its copy of a value that another rank counts is not finite."""
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
        """Begin to gather the weights from the members of the shard axis, or to receive a copy."""
        bucket, link = self.bucket, self.link
        assert self._gathered is done, f"bucket {bucket.index} is being gathered already"
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
        """Wait until nobody reads the weights of this rank's slice any more, which are to change:
        an earlier gather, or the sending of a copy."""
        self.await_weights()
        if self.link is not None:
            self.link.await_sent()

    def await_weights(self) -> None:
        """Wait until the whole weights are gathered."""
        self._gathered()
        self._gathered = done

    def unshard(self) -> None:
        """Begin to gather the weights for a stage, unless another stage has them gathered."""
        self._users += 1
        if self._users == 1 and self.bucket.sharded_weights:
            self.start_gather()

    def reshard(self) -> None:
        """A stage is done with the weights; sharded ones are freed when no stage needs them."""
        self._users -= 1
        if self._users == 0 and self.bucket.sharded_weights:
            self.await_weights()
            self.bucket.free_weights()

    def start_gather_after_update(self) -> None:
        """Begin to gather the updated weights, unless they are gathered on demand (ZeRO-3)."""
        if not self.bucket.sharded_weights:
            self.start_gather()

    def set_weights(self, entry: ParamRange, values: Tensor) -> None:
        """Set weights and master of a parameter to `values`, its local region in full precision."""
        if not self.bucket.sharded_weights:
            copy_into(self.bucket.view(self.bucket.weights, entry), values)
        self.set_state("model", entry, values)

    def weights_in_place(self, entry: ParamRange) -> Tensor | None:
        """The memory of a parameter's weights, flat, if it is the host's and that of the masters:
        :meth:`set_weights` with it copies nothing."""
        own = self.store.in_place("model", 0, 0)
        if own is None or self.bucket.sharded_weights:
            return None
        return self.bucket.weights[entry.start : entry.stop]

    def state_in_place(self, name: str, entry: ParamRange) -> Tensor | None:
        """The memory of a parameter's state, flat, if all of it is the host's and here:
        :meth:`set_state` with it copies nothing."""
        if not self.start <= entry.start <= entry.stop <= self.stop:
            return None
        return self.store.in_place(name, entry.start - self.start, entry.stop - self.start)

    def set_state(self, name: str, entry: ParamRange, values: Tensor) -> None:
        """Set this shard's part of a state; `values` are those of the whole local region."""
        a, b = max(entry.start, self.start), min(entry.stop, self.stop)
        if a < b:
            flat = values.reshape(-1)[a - entry.start : b - entry.start]
            self.store.write(name, a - self.start, b - self.start, flat)
