"""AdamW over flat shards: ZeRO stage 1 (Rajbhandari et al., 1910.02054), or replicated.

Each member of a bucket's group owns one equal slice of it, whatever the parameter boundaries.
With ZeRO-1 gradients are reduce-scattered, a member keeps master weights and moments of its slice
alone, updates it, and the new weights are all-gathered. With ZeRO-0 gradients are all-reduced and
every member updates everything; the slice still says who counts what in the norm and who writes
what into a checkpoint. Update rules are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.config import OptimizerConfig
from megapipe.mesh import ParallelMesh
from megapipe.optim.buffers import Bucket, Entry
from megapipe.tensor_parallel.collectives import all_gather_in_place, all_reduce, reduce_scatter
from megapipe.tensor_parallel.parameter import ParameterSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class Segment(NamedTuple):
    """A range [start, stop) of a bucket that one optimizer parameter updates."""

    start: int
    stop: int
    parameter: Parameter


class OwnSlice(NamedTuple):
    """This rank's share of one parameter: flat range [start, stop) of its local box."""

    spec: ParameterSpec
    start: int
    stop: int
    values: dict[str, Tensor]
    """"model" (the master weights) and the moments, flat."""


class Shard:
    """The part [start, stop) of a bucket that this rank updates, and what it owns of it."""

    def __init__(self, bucket: Bucket, *, sharded: bool) -> None:
        self.bucket = bucket
        slice_length = bucket.numel // bucket.axis.size
        self.own_start = slice_length * bucket.axis.index
        self.own_stop = self.own_start + slice_length
        self.start, self.stop = (self.own_start, self.own_stop) if sharded else (0, bucket.numel)
        weights = bucket.weights[self.start : self.stop]
        dtype = bucket.grads[0].dtype
        self.master = weights if weights.dtype == dtype else weights.to(dtype)
        self.sharded = sharded
        self.segments: list[Segment] = []
        self.decays: list[bool] = []
        for region in bucket.regions():
            a, b = max(region.start, self.start), min(region.stop, self.stop)
            if a < b:
                master = self.master[a - self.start : b - self.start]
                self.segments.append(Segment(a, b, Parameter(master)))
                self.decays.append(region.decay)

    def reduce(self) -> Tensor:
        """Sum the gradients over the group; returns those of [start, stop)."""
        grads = self.bucket.grads[0]
        if self.sharded:
            return reduce_scatter(grads, self.bucket.axis)
        return all_reduce(grads, self.bucket.axis)

    def set_weights(self, entry: Entry, values: Tensor) -> None:
        """Give a whole local parameter its values, in full precision."""
        self.bucket.view(self.bucket.weights, entry).copy_(values)
        a, b = max(entry.start, self.start), min(entry.stop, self.stop)
        if a < b:
            flat = values.reshape(-1)[a - entry.start : b - entry.start]
            self.master[a - self.start : b - self.start].copy_(flat)

    def publish(self) -> None:
        """Bring the updated weights to every member of the group."""
        weights = self.bucket.weights[self.start : self.stop]
        if weights.data_ptr() != self.master.data_ptr():
            weights.copy_(self.master)
        if self.sharded:
            all_gather_in_place(self.bucket.weights, self.bucket.axis)


class Optimizer:
    """Reduces, clips and applies the main gradients of this process' buckets.

    The order of use in a step: :meth:`zero_grad`, the backward passes, :meth:`reduce`,
    :func:`total_norm`, :meth:`update`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], config: OptimizerConfig, mesh: ParallelMesh, stages: int
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.stages = stages
        self.shards = [Shard(bucket, sharded=config.zero >= 1) for bucket in buckets]
        groups: list[dict[str, object]] = [
            {"params": [], "weight_decay": config.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for shard in self.shards:
            for segment, decay in zip(shard.segments, shard.decays, strict=True):
                parameters = groups[0 if decay else 1]["params"]
                assert isinstance(parameters, list)
                parameters.append(segment.parameter)
        self.rule = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.bucket.zero_grad()

    def reduce(self) -> Tensor:
        """Complete the gradients of the step.

        Returns their squared norms, fp64, on every rank: one per stage, then the tied bucket's.
        """
        squares = torch.zeros(self.stages + 1, dtype=torch.float64, device=self.mesh.device)
        for shard in self.shards:
            shard.bucket.add_uses()
            self._sum_sequence_parts(shard.bucket)
            grads = shard.reduce()
            for segment in shard.segments:
                segment.parameter.grad = grads[
                    segment.start - shard.start : segment.stop - shard.start
                ]
            squares[shard.bucket.index] += self._own_square(shard, grads)
        return self.mesh.ordered_sum(squares, "tp", "cp", "dp", "pp")

    def _sum_sequence_parts(self, bucket: Bucket) -> None:
        """One tp all-reduce for what each tp rank saw a share of the sequence of."""
        parts = [
            bucket.view(bucket.grads[0], entry)
            for entry in bucket.entries
            if entry.spec.sequence_partial
        ]
        if parts:
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, self.mesh.tp)
            for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(total.view_as(part))

    def _own_square(self, shard: Shard, grads: Tensor) -> Tensor:
        """Squared norm of the owned slice; what tp ranks hold in common counts on the first."""
        total = torch.zeros((), dtype=torch.float64, device=grads.device)
        for region in shard.bucket.regions():
            a, b = max(region.start, shard.own_start), min(region.stop, shard.own_stop)
            if a < b and (region.split or self.mesh.tp.index == 0):
                part = grads[a - shard.start : b - shard.start]
                total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return total

    @torch.no_grad()
    def update(self, lr: float, norm: Tensor) -> None:
        """Clip by the global `norm` and take one step."""
        if self.config.clip is not None:
            scale = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
            for shard in self.shards:
                for segment in shard.segments:
                    grad = segment.parameter.grad
                    assert grad is not None
                    grad.mul_(scale.to(grad.dtype))
        for group in self.rule.param_groups:
            group["lr"] = lr
        self.rule.step()
        for shard in self.shards:
            for segment in shard.segments:
                segment.parameter.grad = None
            shard.publish()

    @torch.no_grad()
    def set_weights(self, fill: Callable[[ParameterSpec, Tensor], None]) -> None:
        """Set every local weight: `fill(spec, out)` writes a box of a global tensor.

        Masters get the values in full precision, weights in the model dtype.
        """
        for shard in self.shards:
            for entry in shard.bucket.entries:
                values = torch.zeros(entry.spec.sizes, dtype=shard.master.dtype)
                fill(entry.spec, values)
                shard.set_weights(entry, values)

    def set_moments(self, steps: int, fill: Callable[[str, ParameterSpec, Tensor], None]) -> None:
        """Set the moments: `fill(moment, spec, out)` writes a box of a global tensor."""
        for shard in self.shards:
            for segment in shard.segments:
                self.rule.state[segment.parameter] = {
                    "step": torch.tensor(float(steps), device=self.mesh.device),
                    **{m: torch.zeros_like(segment.parameter) for m in MOMENTS},
                }
            for moment in MOMENTS:
                for entry in shard.bucket.entries:
                    if entry.stop <= shard.start or entry.start >= shard.stop:
                        continue
                    values = torch.zeros(entry.spec.sizes, dtype=shard.master.dtype)
                    fill(moment, entry.spec, values)
                    flat = values.flatten()
                    for segment in shard.segments:
                        a, b = max(entry.start, segment.start), min(entry.stop, segment.stop)
                        if a < b:
                            state = self.rule.state[segment.parameter][moment]
                            state[a - segment.start : b - segment.start].copy_(
                                flat[a - entry.start : b - entry.start]
                            )

    def own_slices(self) -> Iterator[OwnSlice]:
        """What this rank alone answers for in a checkpoint: together, every value exactly once."""
        for shard in self.shards:
            for entry in shard.bucket.entries:
                if entry.spec.split_dim is None and self.mesh.tp.index > 0:
                    continue
                for segment in shard.segments:
                    a = max(entry.start, segment.start, shard.own_start)
                    b = min(entry.stop, segment.stop, shard.own_stop)
                    if a < b:
                        yield self._slice(segment, entry, a, b)

    def _slice(self, segment: Segment, entry: Entry, a: int, b: int) -> OwnSlice:
        state = self.rule.state.get(segment.parameter, {})
        here = slice(a - segment.start, b - segment.start)
        values = {"model": segment.parameter.detach()[here]}
        values |= {f"optimizer.{m}": state[m][here] for m in MOMENTS if m in state}
        return OwnSlice(entry.spec, a - entry.start, b - entry.start, values)


def total_norm(squares: Tensor) -> Tensor:
    """The global gradient norm, from the squared norms of :meth:`Optimizer.reduce`.

    Added in stage order, so that no schedule changes a bit of it.
    """
    total = squares[0].clone()
    for square in squares[1:]:
        total += square
    return total.sqrt()
