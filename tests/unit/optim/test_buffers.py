"""Flat buffers: every parameter's place, the regions of equal properties, the tied embedding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.config import Config
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layers.parameter import TORCH_DTYPES, Sharding, spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layout.buckets import ALIGNMENT, Sized, aligned, cut, process_buckets
from megapipe.layout.resolve import resolve
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, main_dtype, make_buckets, owned_parameters
from megapipe.optim.shard import Shard
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.placement import Placement

WORD = "embedding.word.weight"


def group(size: int, index: int = 0) -> Axis:
    """Make the axis of a group that is never asked to communicate."""
    return Axis(size=size, index=index, ranks=tuple(range(size)), group=None)


class FakeMesh:
    """Rank 0 of a grid of pipeline ranks and replicas, whose groups never communicate."""

    backend = "gloo"

    def __init__(self, dp: int) -> None:
        self.dp = group(dp)
        self.device = torch.device("cpu")
        self.rank = 0
        self.grid = Grid(pp=4, dp=dp)
        self.made: list[tuple[int, ...]] = []
        """Members of the groups that were asked for, in order."""

    def group_of(self, ranks: Sequence[int]) -> Axis:
        self.made.append(tuple(ranks))
        return Axis(len(ranks), list(ranks).index(self.rank), tuple(ranks), None)

    def connected(self, axis: Axis) -> Axis:
        return axis


FIRST = StageSpec(embedding=True, layers=range(1), head=False)
MIDDLE = StageSpec(embedding=False, layers=range(1, 2), head=False)
LAST = StageSpec(embedding=False, layers=range(2, 2), head=True)


STAGES = (FIRST, MIDDLE, LAST)
TREE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 6, "heads": 2, "dtype": "bf16"},
    "parallel": {"pp": 2, "tp": 2},
    "train": {"sequence_length": 6, "microbatch": 1},
}


class Made(NamedTuple):
    """Stages of rank 0, and their buckets."""

    modules: Mapping[int, Any]
    buckets: list[Bucket]


def made(
    *here: int,
    dp: int = 4,
    holders: Sequence[Sequence[int]] = (),
    stages: Sequence[StageSpec] = STAGES,
    mesh: FakeMesh | None = None,
    **sections: dict[str, Any],
) -> Made:
    """Make stages with buckets: those `here`, on rank 0 alone, or on the ranks of `holders`."""
    tree = {name: TREE.get(name, {}) | sections.get(name, {}) for name in TREE | sections}
    tree["parallel"] = tree["parallel"] | {"dp": dp}
    tree["train"] = tree["train"] | {"global_batch": 2 * dp}
    config, layout = resolve(Config.model_validate(tree), None, 11)
    on = holders or [(0,) if number in here else (1,) for number in range(len(stages))]
    rows = tuple(tuple(own[i % len(own)] for own in on) for i in range(max(map(len, on))))
    placement = Placement(1 + max(map(max, rows)), rows)
    layout = replace(
        layout, pp=placement.ranks, schedule=gpipe_on(placement, 2), stage_layers=tuple(stages)
    )
    tp = config.parallel.tp
    sharding = Sharding(group(tp, tp - 1), tp > 1, TORCH_DTYPES[config.model.dtype])
    modules = {s: layout.model.build(stages[s], sharding) for s in placement.stages_of(0)}
    plans = list(process_buckets(config, layout, 0))
    fake: Any = mesh or FakeMesh(dp)
    buckets = make_buckets(plans, modules, fake)
    uses = [0 if plan.frozen else plan.uses for plan in plans]
    assert [len(bucket.grads) for bucket in buckets] == uses
    return Made(modules, buckets)


@pytest.mark.parametrize("dp", [1, 4, 7])
def test_entries_lie_end_to_end_in_a_length_that_the_group_divides(dp: int) -> None:
    (bucket,) = made(1, dp=dp).buckets
    assert bucket.entries[0].start == 0
    assert all(b.start in (a.stop, aligned(a.stop)) for a, b in itertools.pairwise(bucket.entries))
    assert all(entry.stop - entry.start == entry.spec.numel for entry in bucket.entries)
    assert 0 <= bucket.numel - bucket.entries[-1].stop < dp * ALIGNMENT
    assert bucket.numel % (dp * ALIGNMENT) == 0
    assert len({entry.spec.name for entry in bucket.entries}) == 12


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("copies", [3, 5, 6])
def test_ranks_that_update_the_same_slice_share_out_all_of_it(shards: int, copies: int) -> None:
    """Each counts an equal part whatever their number, as with ZeRO-0 and hybrid shards."""
    counted: list[int] = []
    for index, copy in itertools.product(range(shards), range(copies)):
        parameters = list(owned_parameters(made(1).modules[1]))
        axes = group(shards, index), group(copies, copy)
        bucket = Bucket(1, parameters, axes[0], torch.device("cpu"), replicate=axes[1])
        shard = Shard(bucket, group(2))
        assert (shard.own_stop - shard.own_start) % ALIGNMENT == 0
        counted += range(shard.own_start, shard.own_stop)
    assert counted == list(range(bucket.numel))
    assert bucket.numel >= bucket.entries[-1].stop


def test_segments_have_equal_properties_and_cover_every_parameter() -> None:
    (bucket,) = made(1).buckets
    segments = list(bucket.segments())
    assert segments[0].start == 0
    assert segments[-1].stop == bucket.entries[-1].stop
    assert all(b.start == aligned(a.stop) for a, b in itertools.pairwise(segments))
    kinds = []
    for here in segments:
        inside = [e.spec for e in bucket.entries if here.start <= e.start and e.stop <= here.stop]
        ((decay, split),) = {(spec.decay, spec.split) for spec in inside}
        assert (here.decay, here.is_primary) == (decay, split), "a second tp rank counts no copies"
        kinds.append((decay, split))
        matrices = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
        assert all(decay == spec.name.endswith(matrices) for spec in inside)
    assert kinds == [(True, True), (False, True), (False, False)], "decay first, split first"


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp64"])
def test_parameters_and_main_gradients_are_views_of_the_buffers(name: str) -> None:
    modules, (bucket,) = made(1, model={"dtype": name})
    module, dtype = modules[1], TORCH_DTYPES[name]
    main = torch.float64 if dtype == torch.float64 else torch.float32
    assert main_dtype(dtype) == main
    assert (bucket.weights.dtype, bucket.grads[0].dtype) == (dtype, main)
    bucket.weights.copy_(torch.arange(bucket.numel))
    bucket.grads[0].copy_(torch.arange(bucket.numel))
    entries = {entry.spec.name: entry for entry in bucket.entries}
    parameters = list(module.parameters())
    assert len(parameters) == len(entries)
    for parameter in parameters:
        entry = entries[spec_of(parameter).name]
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        assert parameter.shape == main_grad(parameter).shape == entry.spec.sizes
        values = torch.arange(entry.start, entry.stop).view(entry.spec.sizes)
        assert parameter.detach().equal(values.to(dtype))
        assert main_grad(parameter).equal(values.to(main))
    bucket.zero_grad()
    assert not any(main_grad(parameter).any() for parameter in parameters)


KINDS = {
    "trained": {(False, False), (True, False)},
    "adapted": {(False, False), (False, True), (True, True)},
}
"""Kinds of buckets of a stage with experts: (experts, frozen)."""


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("chunk_mib", [None, 1e-6])
def test_no_two_buckets_of_a_stage_begin_at_the_same_place(
    what: str, chunk_mib: float | None
) -> None:
    """Values are rounded with random numbers of their places, also those of experts, of frozen
    weights and of pieces that are reduced separately."""
    moe = {"num_experts": 2, "layer_freq": 2, "expert_ffn_hidden": 8, "topk_groups": 1}
    buckets = made(
        0,
        stages=(StageSpec(embedding=False, layers=range(3), head=False), LAST),
        model={"moe": moe, "layers": 3},
        parallel={"pp": 2, "tp": 1},
        optimizer={"bucket_mib": chunk_mib},
        lora={"rank": 2} if what == "adapted" else {},
    ).buckets
    assert {(bucket.over_ep, bucket.frozen) for bucket in buckets} == KINDS[what]
    whole = len(KINDS[what])
    assert len(buckets) == whole if chunk_mib is None else len(buckets) > whole
    places = sorted((bucket.start, bucket.start + bucket.entries[-1].stop) for bucket in buckets)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))


def test_a_bucket_per_stage_and_one_for_the_tied_embedding() -> None:
    buckets = made(2, 0).buckets
    assert [bucket.index for bucket in buckets] == [0, 2, 3], "the tied one comes last"
    names = [{entry.spec.name for entry in bucket.entries} for bucket in buckets]
    assert WORD not in names[0] | names[1]
    assert names[2] == {WORD}
    assert names[1] == {"final_norm.weight", "final_norm.bias"}


def test_a_tied_embedding_on_one_rank_is_one_entry_with_two_gradients() -> None:
    modules, (*_, tied) = made(0, 2)
    embedding, head = modules[0].embedding, modules[2].head
    assert embedding is not None
    assert head is not None
    assert len(tied.entries) == 1
    assert len(tied.grads) == 2
    assert embedding.weight.data_ptr() == head.weight.data_ptr(), "one copy of the weights"
    main_grad(embedding.weight).fill_(1)
    main_grad(head.weight).fill_(2)
    assert tied.grads[0][: tied.entries[0].stop].eq(1).all(), "each use has its own gradient"
    tied.sum_tied_grads()
    assert main_grad(embedding.weight).eq(3).all()
    tied.zero_grad()
    assert not any(grad.any() for grad in tied.grads)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_holder_of_one_use_has_one_gradient(stage: int) -> None:
    *_, tied = made(stage).buckets
    assert [entry.spec.name for entry in tied.entries] == [WORD]
    assert len(tied.grads) == 1


def test_untied_embedding_and_head_stay_with_their_stages() -> None:
    buckets = made(0, 2, model={"tied_embeddings": False}).buckets
    assert [bucket.index for bucket in buckets] == [0, 2]
    assert [len(bucket.grads) for bucket in buckets] == [1, 1]
    assert WORD in {entry.spec.name for entry in buckets[0].entries}
    assert "head.weight" in {entry.spec.name for entry in buckets[1].entries}


def test_a_stage_without_parameters_of_its_own_has_no_bucket() -> None:
    empty = StageSpec(embedding=False, layers=range(1, 1), head=False)
    assert made(1, stages=(FIRST, empty, LAST)).buckets == []


def test_where_every_stage_has_one_holder_no_group_is_made() -> None:
    mesh = FakeMesh(dp=2)
    buckets = made(0, 2, dp=2, mesh=mesh, model={"tied_embeddings": False}).buckets
    assert all(bucket.shard is mesh.dp for bucket in buckets)
    assert mesh.made == []


def test_a_replicated_stage_shares_its_bucket_with_all_its_holders() -> None:
    """Two pipelines in opposite directions: this rank holds a stage of each."""
    mesh = FakeMesh(dp=2)
    first, last, tied = made(dp=2, mesh=mesh, holders=((0, 3), (1, 2), (3, 0))).buckets
    assert mesh.made == [(0, 1, 6, 7)], "dp x holders, and one group for the same holders"
    assert first.shard is last.shard is tied.shard
    assert first.shard.size == 4
    assert first.numel % 4 == 0


def test_stages_with_other_holders_have_a_group_of_their_own() -> None:
    mesh = FakeMesh(dp=1)
    first, middle, last, tied = made(dp=1, mesh=mesh, holders=((0, 2), (0,), (0, 1))).buckets
    assert mesh.made == [(0, 2), (0, 1), (0, 1, 2)]
    assert (first.shard.ranks, last.shard.ranks) == ((0, 2), (0, 1))
    assert middle.shard.size == 1
    assert tied.shard.ranks == (0, 1, 2), "those of the first and of the last stage, once each"


@pytest.mark.parametrize(("first", "last"), [((0,), (2,)), ((2,), (0,)), ((0, 2), (2, 0))])
def test_the_tied_embedding_is_shared_by_the_holders_of_both_ends(
    first: tuple[int, ...], last: tuple[int, ...]
) -> None:
    mesh = FakeMesh(dp=2)
    *_, tied = made(dp=2, mesh=mesh, holders=(first, (1,), last)).buckets
    assert tied.shard.ranks == (0, 1, 4, 5)
    assert tied.index == 3


SIZES = st.lists(st.tuples(st.integers(1, 70), st.booleans(), st.booleans()), max_size=9)


@given(SIZES, st.integers(1, 200))
def test_pieces_are_runs_of_matrices_the_last_first_and_then_the_rest(
    sizes: list[tuple[int, bool, bool]], least: int
) -> None:
    listed = [Sized(str(i), *each) for i, each in enumerate(sizes)]
    matrices = [each for each in listed if each.decays and each.split]
    (whole,) = cut(listed, None)
    assert whole == (frozenset(each.name for each in listed), 0)
    pieces = cut(listed, least)
    assert sorted(name for piece in pieces for name in piece.names) == [e.name for e in listed]
    if len(pieces) == 1:
        assert pieces == [whole]
        return
    if len(matrices) < len(listed):
        *pieces, rest = pieces
        assert rest.start == aligned(sum(each.numel for each in matrices))
    stop = sum(each.numel for each in matrices)
    for piece in pieces:
        assert [e.name for e in matrices if e.name in piece.names] == sorted(piece.names, key=int)
        assert stop - sum(e.numel for e in matrices if e.name in piece.names) == piece.start
        assert piece.start % ALIGNMENT == 0
        assert piece.start == 0 or stop - piece.start >= least
        stop = piece.start
    assert stop == 0


def test_what_one_process_alone_holds_is_not_cut() -> None:
    small = {"bucket_mib": 1e-6}
    assert len(made(1, dp=1, optimizer=small).buckets) == 1
    cut_up = made(1, dp=2, optimizer=small).buckets
    first = [bucket.entries[0].spec.name.split(".", 2)[2] for bucket in cut_up]
    assert first == ["mlp.down.weight", "attention.qkv.weight", "attention.qkv.bias"], (
        "the others begin at no multiple of the alignment"
    )
    assert {bucket.index for bucket in cut_up} == {1}
    shared = made(dp=2, holders=((1,), (0, 1), (1,)), optimizer=small).buckets
    assert len(shared) == 1
