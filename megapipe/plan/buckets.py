"""Sizes of the flat buffers that a process will reduce, shard and gather.

A stage's parameters lie in one bucket, or in several that are reduced one by one, and tied
embeddings in one of their own; see :mod:`megapipe.optim.buffers`, whose sizes these are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megapipe.config import Config
from megapipe.dtypes import main_bytes
from megapipe.layers.specs import ParameterSpec, by_name
from megapipe.layout.layout import Layout

ALIGNMENT = 16
"""Ranges that an update touches begin at multiples of this many values, so that vector instructions
cut and round a parameter in the same way whatever slice of a bucket it is in."""


def aligned(length: int, parts: int = 1) -> int:
    """`length` padded so that each of `parts` equal slices is a multiple of :data:`ALIGNMENT`."""
    multiple = ALIGNMENT * parts
    return -(-length // multiple) * multiple


KINDS = ((False, False), (True, False), (False, True), (True, True))
"""Parameters of a stage that are in buckets of their own: of experts or not, frozen or not."""


def kind_of(spec: ParameterSpec) -> tuple[bool, bool]:
    """Which of :data:`KINDS`."""
    return spec.experts, spec.frozen


class Sized(NamedTuple):
    """A parameter as a process holds it."""

    name: str
    numel: int
    decays: bool
    split: bool
    """Split over tp; otherwise every tp rank holds the same values."""


class Cut(NamedTuple):
    """Parameters of a stage that are reduced together."""

    names: frozenset[str]
    start: int
    """Where they would begin in one buffer of the whole stage."""


def cut(parameters: Iterable[Sized], least: int | None) -> list[Cut]:
    """Cut a stage's parameters, in forward order, into buckets of at least `least` values.

    Buckets come in the order in which a backward completes them: matrices that are split over tp,
    the last layers first, then everything else. The bucket of the first matrices may be smaller.
    There is one bucket if there is too little to cut, or `least` is None.
    """
    listed = list(parameters)
    matrices = [each for each in listed if each.decays and each.split]
    start = total = sum(each.numel for each in matrices)
    stop, names = total, list[str]()
    cuts = []
    for each in reversed(matrices):
        start -= each.numel
        names.append(each.name)
        full = least is not None and stop - start >= least
        if start == 0 or (full and start % ALIGNMENT == 0):
            cuts.append(Cut(frozenset(names), start))
            stop, names = start, []
    if len(cuts) < 2:
        return [Cut(frozenset(each.name for each in listed), 0)]
    rest = frozenset(each.name for each in listed if not (each.decays and each.split))
    return [*cuts, Cut(rest, aligned(total))] if rest else cuts


def chunk_length(chunk_mib: float | None, size: int) -> int | None:
    """``optimizer.reduce_chunk_mib`` as a number of gradients of `size` bytes; None stays None."""
    return None if chunk_mib is None else max(1, int(chunk_mib * 2**20) // size)


@dataclass(frozen=True)
class Group:
    """Processes that share a bucket, or a slice of it."""

    axis: str
    """dp or a part of it (dp:shard, dp:replicate), times the pipeline indices if there are several,
    as in dp*pp[0,3]; pp for all of them without dp. dp*cp in the place of dp where positions are
    split, and for experts edp where these have more copies than other weights."""
    members: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of a stage (or that of the tied embedding) that a rank holds."""

    stage: int
    """Number of the stage; for the tied bucket the number of stages."""
    parameters: tuple[ParameterSpec, ...]
    """Each once, also a tied one that a process uses twice."""
    tp: int
    ep: int
    etp: int
    shard: Group
    """Processes that own different slices of equal length."""
    replicate: Group
    """Processes that own the same slice."""
    shared: bool
    """Several stages or holders share the bucket, so it is reduced once a step."""
    uses: int = 1
    """Gradient buffers of the bucket: 2 where the process uses a tied matrix twice."""
    frozen: bool = False
    """Its parameters are not trained, so it has no gradients and no optimizer state."""
    linked: bool = False
    """A bucket of another stage has the same parameters; messages between both take the place of
    sums and gathers over both (:mod:`megapipe.optim.link`)."""
    slots: int = 0
    """Copies of experts of others that a process may have beside it in each layer; their gradients
    come at the end of a step."""
    updates: bool = True
    """Its processes update it; otherwise they have a copy, and no optimizer state."""

    @property
    def numel(self) -> int:
        """Values in the buffer, padded by :func:`aligned` between its segments and slices."""
        sizes: dict[tuple[bool, bool], int] = defaultdict(int)
        for each in _sized(self.parameters, self.tp, self.ep, self.etp):
            sizes[each.decays, each.split] += each.numel
        owners = self.shard.members * self.replicate.members
        return aligned(sum(map(aligned, sizes.values())), owners)

    @property
    def experts(self) -> bool:
        """Whether its parameters are those of experts."""
        return any(spec.experts for spec in self.parameters)

    @property
    def in_runs(self) -> bool:
        """Whether under ZeRO-2 and 3 its gradients are reduced after each run of a stage's weight
        gradients, and have memory until then; otherwise once a step."""
        return not (self.shared or self.alone or self.slots or self.frozen)

    @property
    def copies(self) -> int:
        """Values of copies of experts on one rank, in all their slots."""
        if not self.slots:
            return 0
        experts = {spec.name: spec.shape[0] // self.ep for spec in self.parameters}
        return sum(self._values([p]) // experts[p.name] for p in self.parameters) * self.slots

    @property
    def alone(self) -> bool:
        """Whether no other process has another slice of it."""
        return self.shard.members == 1

    @property
    def of_heads(self) -> int:
        """Values whose gradients each tp rank has of its heads alone."""
        of_heads = self._values(spec for spec in self.parameters if spec.heads_partial)
        return of_heads if self.tp > 1 else 0

    @property
    def whole(self) -> int:
        """Values of parameters that every tp rank holds whole, with shards of its own."""
        return self._values(spec for spec in self.parameters if not (spec.split or spec.experts))

    @property
    def multiplied(self) -> int:
        """Values of parameters whose gradients are matrix products; an embedding's are not."""
        return self._values(spec for spec in self.parameters if spec.multiplied)

    @property
    def norms(self) -> int:
        """Values of parameters whose gradients autograd computes within I."""
        return self._values(spec for spec in self.parameters if spec.by_autograd)

    def _values(self, parameters: Iterable[ParameterSpec]) -> int:
        """Values of these parameters on one rank."""
        return sum(spec.local_numel(self.tp, self.ep, self.etp) for spec in parameters)


def _sized(parameters: Iterable[ParameterSpec], tp: int, ep: int, etp: int) -> Iterator[Sized]:
    for spec in parameters:
        yield Sized(spec.name, spec.local_numel(tp, ep, etp), spec.decay, spec.split)


def process_buckets(config: Config, layout: Layout, rank: int) -> Iterator[BucketPlan]:
    """Buckets of a process at pipeline index `rank`, in the order of stages and, within a stage, of
    reduction, then that of experts and those of what is frozen; the tied one comes last."""
    placement = layout.schedule.placement
    least = chunk_length(config.optimizer.reduce_chunk_mib, main_bytes(layout.model.dtype))

    def buckets(
        stage: int, parameters: Sequence[ParameterSpec], ranks: Iterable[int], shared: bool
    ) -> Iterator[BucketPlan]:
        for experts, frozen in KINDS:
            some = [spec for spec in parameters if kind_of(spec) == (experts, frozen)]
            if some:
                yield from alike(stage, some, ranks, shared, frozen, experts)

    def alike(
        stage: int,
        parameters: Sequence[ParameterSpec],
        ranks: Iterable[int],
        shared: bool,
        frozen: bool,
        experts: bool,
    ) -> Iterator[BucketPlan]:
        holders = (0,) if layout.in_process else tuple(sorted(set(ranks)))
        groups = _groups(config, layout, holders, experts=experts)
        whole = shared or frozen or experts or all(group.members == 1 for group in groups)
        sizes = layout.tp, *layout.of_experts
        for own_cut in cut(_sized(parameters, *sizes), None if whole else least):
            own = tuple(spec for spec in parameters if spec.name in own_cut.names)
            slots = config.experts.slots if experts else 0
            yield BucketPlan(stage, own, *sizes, *groups, shared, frozen=frozen, slots=slots)

    tied: list[ParameterSpec] = []
    for stage in layout.process_stages(rank):
        parameters = list(layout.model.parameters(layout.stage_layers[stage]))
        tied += (spec for spec in parameters if spec.tied)
        own = [spec for spec in parameters if not spec.tied]
        holders = placement.holders(stage)
        if own:
            yield from buckets(stage, own, holders, len(holders) > 1)
    if tied:
        ends = (*placement.holders(0), *placement.holders(layout.stages - 1))
        linked = layout.links_tied
        sharing = (rank,) if linked else ends
        (bucket,) = buckets(layout.stages, list(by_name(tied).values()), sharing, True)
        updates = not linked or rank in placement.holders(0)
        yield replace(bucket, uses=len(tied), linked=linked, updates=updates)


def _groups(
    config: Config, layout: Layout, holders: tuple[int, ...], *, experts: bool
) -> tuple[Group, Group]:
    """Who shards and who replicates a bucket of these pipeline indices; see optim.policy."""
    copies, own = layout.copies_of_experts if experts else layout.dp_cp, holders[:1]
    name = "dp" if layout.cp == 1 else "dp*cp"
    if experts and layout.expert_ranks != layout.tp:
        name = "edp"

    def group(members: int, stride: int, pp_indices: tuple[int, ...]) -> Group:
        """`members` copies, `stride` apart, at each of the pipeline indices."""
        parts = []
        if members > 1:
            part = "" if members == copies else ":shard" if stride == 1 else ":replicate"
            parts.append(f"{name}{part}")
        if len(pp_indices) > 1:
            whole = len(pp_indices) == layout.pp and not parts
            parts.append("pp" if whole else f"pp[{','.join(map(str, pp_indices))}]")
        return Group("*".join(parts) or name, members * len(pp_indices))

    zero, shard_size = layout.replicas.zero, config.optimizer.shard_size
    if zero == 0:
        return group(1, 1, own), group(copies, 1, holders)
    if shard_size is None and zero < 3:
        return group(copies, 1, holders), group(1, 1, own)
    size = min(shard_size or copies, copies)
    return group(size, 1, own), group(copies // size, size, holders)
