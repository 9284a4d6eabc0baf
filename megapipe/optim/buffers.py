"""Contiguous parameter and gradient buffers, one bucket per virtual stage or a few.

A bucket holds a stage's parameters in the model dtype and their main gradients in fp32 (fp64 for
fp64), each as one flat array, so that reducing, sharding and gathering are one call per bucket. A
large stage has several, so that its last layers' gradients can leave while those of the first are
being computed (Li et al., 2006.15704). Parameters are ordered by :class:`BucketSegment`: those that
decay before those that do not, split ones before those that every tp rank holds; weight decay and
the norm then act on a few ranges.

A stage that several pipeline ranks hold (bidirectional pipelines) has a bucket that they share:
its shard group is dp x holders, so one owner updates a slice and all holders gather it, and the
copies stay bitwise equal. So has a tied embedding, which the first and the last stage use; the two
uses accumulate into gradients of their own and are added once. In a pipeline that never flushes
each of the two has a bucket for it, and a link between them (:mod:`megapipe.optim.link`).

Frozen parameters are in buckets of their own, which have weights alone. So are those split over ep,
whose gradients are summed over the tp ranks too: each has the rows of its own tokens.

Which parameters a bucket has, and who shares it, is planned: :mod:`megapipe.layout.buckets`.
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
from megapipe.optim.link import TiedEmbeddingLink


class ModuleLike(Protocol):
    """Modules with parameters: a model, or a stage of one."""

    def modules(self) -> Iterator[nn.Module]: ...


class Owned(NamedTuple):
    """A parameter and where in a model it stands."""

    module: nn.Module
    name: str
    parameter: Parameter

    def replace(self, new: Parameter) -> None:
        """Put `new`, which has the storage that this one lacks, in its place."""
        cast(Any, new).spec = spec_of(self.parameter)
        self.module._parameters[self.name] = new


def owned_parameters(module: ModuleLike) -> Iterator[Owned]:
    """All parameters of a module, one by one also where two share a name."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield Owned(owner, name, parameter)


class ParamRange(NamedTuple):
    """A parameter's place [start, stop) in its bucket."""

    spec: LocalParameter
    start: int
    stop: int


class BucketParam(NamedTuple):
    """A parameter of a module, its place in the bucket, and which of its gradients is its."""

    parameter: Parameter
    entry: ParamRange
    use: int


class BucketSegment(NamedTuple):
    """A range [start, stop) of a bucket whose parameters share these properties."""

    start: int
    stop: int
    decay: bool
    is_primary: bool
    """In the norm of all ranks, by this one."""


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of main gradients, master weights and optimizer state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Bucket:
    """Flat weights and main gradients of all or some parameters of a stage, or of a tied embedding.

    `index` is the stage number; the tied bucket's is the number of stages. `start` is where this
    bucket would begin in one bucket of the whole stage. Gradients are summed over `shard` x
    `replicate`; the members of `shard` own slices of equal length. Regions and slices are
    :func:`aligned`, with zeros in between. A `shared` bucket has several stages or several holders;
    `holders` counts those in this process, and the last of them completes the gradients.

    With `sharded_grads` the main gradients have memory between :meth:`alloc_grads` and
    :meth:`free_grads` only; with `sharded_weights` so have the weights, likewise. The gradients of
    a `late` one are reduced once, at the end of a step. Parameters of a `frozen` one have no
    gradients. `link` leads to a bucket of another stage with the same parameters.
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
        """Whether its parameters are split over ep; then all are."""
        uses = sorted({spec_of(owned.parameter).use for owned in parameters})
        ordered = sorted(parameters, key=lambda owned: _segment_key(spec_of(owned.parameter)))
        places: dict[str, ParamRange] = {}
        stop, region = 0, None
        for owned in ordered:
            spec = spec_of(owned.parameter)
            if spec.name not in places:
                if region != _segment_key(spec):
                    region, stop = _segment_key(spec), aligned(stop)
                places[spec.name] = ParamRange(spec, stop, stop + spec.numel)
                stop += spec.numel
        self.entries: list[ParamRange] = list(places.values())
        owners = self.shard.size * self.replicate.size
        self.numel = aligned(stop, owners)
        dtype = ordered[0].parameter.dtype
        self.weights = torch.zeros(self.numel, dtype=dtype, device=device)
        self.grads = [
            torch.zeros(self.numel, dtype=main_dtype(dtype), device=device)
            for _ in (() if frozen else uses)
        ]
        self._early: dict[str, Tensor] = {}
        """Gradients that autograd computes within ``I``, which may be before `alloc_grads`."""
        self.placed: list[BucketParam] = []
        for owned in ordered:
            spec = spec_of(owned.parameter)
            entry = places[spec.name]
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
        """The ranges of equal properties, in order."""
        start = 0
        for i, entry in enumerate(self.entries):
            key = _segment_key(entry.spec)
            last = i + 1 == len(self.entries)
            if last or _segment_key(self.entries[i + 1].spec) != key:
                yield BucketSegment(start, entry.stop, entry.spec.decay, entry.spec.is_primary)
                start = aligned(entry.stop)

    def sum_tied_grads(self) -> None:
        """Add the gradients of all uses into the first; the order of uses is fixed."""
        for other in self.grads[1:]:
            self.grads[0] += other

    def zero_grad(self) -> None:
        """Begin a step. Gradients that are sharded get memory, and zeros, when they are opened."""
        for grad in self._early.values():
            grad.zero_()
        if self.sharded_grads:
            self.free_grads()
        else:
            for grad in self.grads:
                grad.zero_()

    @property
    def early_grads(self) -> list[Tensor]:
        """Gradients that are kept apart, as they may come before `grads` has memory."""
        return list(self._early.values())

    def alloc_grads(self) -> None:
        """Give sharded gradients memory, with zeros."""
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
        """Give sharded weights memory; returns a tensor through which it is to be filled.

        That tensor has the memory of the weights but not their version counter, so autograd sees no
        change: the values that come back are those that it has seen before.
        """
        _restore(self.weights)
        return self.weights.data

    def free_weights(self) -> None:
        _release(self.weights)


def _release(flat: Tensor) -> None:
    """Free the memory; views stay valid, and have memory again after :func:`_restore`."""
    flat.untyped_storage().resize_(0)


def _restore(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _segment_key(spec: LocalParameter) -> tuple[bool, bool]:
    """By which segments come in order, the same on every tp rank."""
    return not spec.decay, not spec.split


def make_buckets(
    plans: Iterable[BucketPlan], modules: Mapping[int, ModuleLike], mesh: ParallelMesh
) -> list[Bucket]:
    """Make the buckets of this process' stages by their `plans`, in that order; they give the
    parameters their storage. Parameters of a bucket are in the order of the modules."""
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
