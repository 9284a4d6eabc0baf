"""Contiguous parameter and gradient buffers: one bucket per virtual stage, or several.

A bucket holds a stage's parameters in the model dtype and their main gradients in fp32 (fp64 for
fp64), each as one flat array, so that reducing, sharding and gathering are one call per bucket. A
large stage has several buckets, so that its last layers' gradients are reduced while its first
layers' are computed (Li et al., 2006.15704). Parameters are ordered by :class:`BucketSegment`:
decayed before others, split ones before those that every tp rank holds. So weight decay and the
norm act on a few ranges.

If several pipeline ranks hold a stage (bidirectional pipelines), they share its bucket: the shard
group is dp x holders, so that one owner updates a shard and all holders gather it, and all replicas
stay bitwise equal. The first and the last stage share the bucket of a tied embedding in the same
way; each use has its own gradient accumulator, and the accumulators are summed before the
reduction. In a no-flush pipeline both stages have a bucket for the tied embedding, and a link
connects the two buckets (:mod:`megapipe.optim.tied_embedding`).

Frozen parameters have separate buckets, with weights only. Parameters split over ep have separate
buckets too. Their gradients are summed over tp too, as each tp rank has other tokens.

:mod:`megapipe.layout.buckets` plans which parameters a bucket has, and which ranks share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layers.parameter import LocalParameter, spec_of
from megapipe.layout.buckets import BucketPlan, aligned
from megapipe.optim.groups import BucketGroups
from megapipe.optim.tied_embedding import TiedEmbeddingLink


class ModuleLike(Protocol):
    """A model or a stage: anything with modules that have parameters."""

    def modules(self) -> Iterator[nn.Module]: ...


class Owned(NamedTuple):
    """A parameter, the module that owns it, and its name in the module."""

    module: nn.Module
    name: str
    parameter: Parameter

    def replace(self, new: Parameter) -> None:
        """Replace the parameter in its module by `new`, whose memory is in a bucket."""
        cast(Any, new).spec = spec_of(self.parameter)
        self.module._parameters[self.name] = new


def owned_parameters(module: ModuleLike) -> Iterator[Owned]:
    """Yield all parameters of a module; a tied embedding that is used twice is yielded twice."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield Owned(owner, name, parameter)


class ParamRange(NamedTuple):
    """A parameter and its range [start, stop) in its bucket."""

    spec: LocalParameter
    start: int
    stop: int


class BucketParam(NamedTuple):
    """A parameter of a module, its range in the bucket, and the index of its gradient buffer."""

    parameter: Parameter
    entry: ParamRange
    use: int


class BucketSegment(NamedTuple):
    """A range [start, stop) of a bucket whose parameters agree in `decay` and `is_primary`."""

    start: int
    stop: int
    decay: bool
    is_primary: bool
    """Whether this rank counts the range in the global norm."""


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of main gradients, masters and states for weights of type `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Bucket:
    """Flat weights and main gradients of all or some parameters of a stage, or of a tied embedding.

    `index` is the stage index, or the number of stages for the tied embedding. `start` is the
    offset that the bucket would have in a single bucket of the stage. Gradients are summed over
    `shard` x `replicate`; the ranks of `shard` own shards of equal length. Segments and shards are
    :func:`aligned`, with zeros in between. A `shared` bucket has several stages or several holders.
    `holders` is the number of pipeline ranks in this process that hold the stage; gradients are
    complete when all of these have added theirs.

    With `sharded_grads`, main gradients have memory only between :meth:`alloc_grads` and
    :meth:`free_grads`; with `sharded_weights`, weights only between :meth:`alloc_weights` and
    :meth:`free_weights`. With `late`, gradients are reduced once, at the end of a step. With
    `frozen`, there are no gradients. `link` leads to another stage's bucket with the same
    parameters.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[Owned],
        shard: Axis,
        device: torch.device,
        *,
        start: int = 0,
        replicate: Axis | None = None,
        shared: bool = False,
        holders: int = 1,
        sharded_grads: bool = False,
        sharded_weights: bool = False,
        late: bool = False,
        frozen: bool = False,
        link: TiedEmbeddingLink | None = None,
    ) -> None:
        self.index = index
        self.start = start
        self.shard = shard
        self.replicate = replicate or Axis.alone()
        self.shared = shared
        self.holders = holders
        self.sharded_grads = sharded_grads
        self.sharded_weights = sharded_weights
        self.late = late
        self.frozen = frozen
        self.link = link
        self.over_ep = spec_of(parameters[0].parameter).over_ep
        """Whether all parameters are split over ep; otherwise none of them is."""
        uses = sorted({spec_of(owned.parameter).use for owned in parameters})
        ordered = sorted(parameters, key=lambda owned: _segment_key(spec_of(owned.parameter)))
        ranges: dict[str, ParamRange] = {}
        stop, region = 0, None
        for owned in ordered:
            spec = spec_of(owned.parameter)
            if spec.name not in ranges:
                if region != _segment_key(spec):
                    region, stop = _segment_key(spec), aligned(stop)
                ranges[spec.name] = ParamRange(spec, stop, stop + spec.numel)
                stop += spec.numel
        self.entries: list[ParamRange] = list(ranges.values())
        owners = self.shard.size * self.replicate.size
        self.numel = aligned(stop, owners)
        dtype = ordered[0].parameter.dtype
        self.weights = torch.zeros(self.numel, dtype=dtype, device=device)
        self.grads = [
            torch.zeros(self.numel, dtype=main_dtype(dtype), device=device)
            for _ in (() if frozen else uses)
        ]
        self._early: dict[str, Tensor] = {}
        """Buffers, by name, for gradients that autograd may compute before `alloc_grads`."""
        self.placed: list[BucketParam] = []
        for owned in ordered:
            spec = spec_of(owned.parameter)
            entry = ranges[spec.name]
            new = Parameter(self.view(self.weights, entry), requires_grad=not frozen)
            owned.replace(new)
            self.placed.append(BucketParam(new, entry, uses.index(spec.use)))
            if frozen:
                continue
            grad = self.view(self.grads[uses.index(spec.use)], entry)
            if sharded_grads and spec.grad_by_autograd:
                grad = self._early.setdefault(spec.name, torch.zeros_like(grad))
            cast(Any, new).main_grad = grad
        if sharded_grads:
            _release(self.grads[0])
        if sharded_weights:
            _release(self.weights)

    @staticmethod
    def view(flat: Tensor, entry: ParamRange) -> Tensor:
        return flat[entry.start : entry.stop].view(entry.spec.sizes)

    def segments(self) -> Iterator[BucketSegment]:
        """Yield the segments of the bucket, in order."""
        start = 0
        for i, entry in enumerate(self.entries):
            key = _segment_key(entry.spec)
            last = i + 1 == len(self.entries)
            if last or _segment_key(self.entries[i + 1].spec) != key:
                yield BucketSegment(start, entry.stop, entry.spec.decay, entry.spec.is_primary)
                start = aligned(entry.stop)

    def sum_tied_grads(self) -> None:
        """Add the gradients of a tied embedding's later uses to those of the first use."""
        for other in self.grads[1:]:
            self.grads[0] += other

    def zero_grad(self) -> None:
        """Begin a step: zero all gradients; sharded ones are freed instead, until `alloc_grads`."""
        for grad in self._early.values():
            grad.zero_()
        if self.sharded_grads:
            self.free_grads()
        else:
            for grad in self.grads:
                grad.zero_()

    @property
    def early_grads(self) -> list[Tensor]:
        """Gradients with separate memory: they may be computed before `grads` has memory."""
        return list(self._early.values())

    def alloc_grads(self) -> None:
        """Allocate the memory of sharded gradients, and zero it."""
        _restore(self.grads[0])
        self.grads[0].zero_()

    def collect_early(self) -> None:
        """Move the gradients that autograd has computed so far into `grads`."""
        for entry in self.entries:
            early = self._early.get(entry.spec.name)
            if early is not None:
                self.view(self.grads[0], entry).copy_(early)
                early.zero_()

    def free_grads(self) -> None:
        _release(self.grads[0])

    def alloc_weights(self) -> Tensor:
        """Allocate the memory of sharded weights, and return a tensor through which to fill it.

        The returned tensor shares the memory of the weights but not their version counter. So
        autograd sees no change: the weights get the values that they had before they were freed.
        """
        _restore(self.weights)
        return self.weights.data

    def free_weights(self) -> None:
        _release(self.weights)


def _release(flat: Tensor) -> None:
    """Free the memory of `flat`; views stay valid, and have memory again after :func:`_restore`."""
    flat.untyped_storage().resize_(0)


def _restore(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _segment_key(spec: LocalParameter) -> tuple[bool, bool]:
    """Return the sort key of a parameter's segment, equal on every tp rank."""
    return not spec.decay, not spec.split


def make_buckets(
    plans: Iterable[BucketPlan], modules: Mapping[int, ModuleLike], mesh: ParallelMesh
) -> list[Bucket]:
    """Make this process's buckets, one per plan, in the order of `plans`. Each bucket holds the
    memory of its parameters, which keep the order of `modules` within a segment."""
    plans = list(plans)
    numbers = {spec.name: n for n, plan in enumerate(plans) for spec in plan.parameters}
    owned: list[list[Owned]] = [[] for _ in plans]
    for _, module in sorted(modules.items()):
        for each in owned_parameters(module):
            owned[numbers[spec_of(each.parameter).name]].append(each)
    groups = BucketGroups(mesh)
    buckets = []
    for plan, own in zip(plans, owned, strict=True):
        link = None if plan.link is None else groups.link(*plan.link)
        bucket = Bucket(
            plan.stage,
            own,
            groups.axis(plan.shard),
            mesh.device,
            start=plan.start,
            replicate=groups.axis(plan.replicate),
            shared=plan.shared,
            holders=plan.holders,
            sharded_grads=plan.sharded_grads,
            sharded_weights=plan.sharded_weights,
            late=plan.late,
            frozen=plan.frozen,
            link=link,
        )
        assert bucket.numel == plan.numel, f"{bucket.numel} values, and {plan.numel} planned"
        buckets.append(bucket)
    return buckets
