"""Flat buffers: every parameter's place, the regions of equal properties, the tied embedding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.distributed.mesh import Axis, Grid
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.moe_config import MoEConfig
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, main_dtype, make_buckets, owned_parameters
from megapipe.optim.policy import ZeroPolicy
from megapipe.optim.shard import Shard
from megapipe.plan.buckets import ALIGNMENT, Sized, aligned, cut

MODEL = ModelConfig(layers=2, hidden=6, heads=2, vocab_size=11).resolved(
    vocab_size=11, sequence_length=5
)
WORD = "embedding.word.weight"


def group(size: int, index: int = 0) -> Axis:
    """A place in a group that is never asked to communicate."""
    return Axis(size=size, index=index, ranks=tuple(range(size)), group=None)


def stage(
    spec: StageSpec, *, tp: int = 2, dtype: torch.dtype = torch.bfloat16, tied: bool = True
) -> GPTStage:
    model = MODEL.model_copy(update={"tied_embeddings": tied})
    return GPTStage(model, spec, Sharding(group(tp, tp - 1), True, dtype))


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


ONE_HOLDER = ((0,), (0,), (0,))


def buckets_of(
    modules: dict[int, GPTStage],
    *,
    dp: int = 4,
    holders: Sequence[Sequence[int]] = ONE_HOLDER,
    mesh: FakeMesh | None = None,
    policy: ZeroPolicy | None = None,
) -> list[Bucket]:
    fake: Any = mesh or FakeMesh(dp)
    return make_buckets(modules, fake, policy or ZeroPolicy(), holders=holders)


FIRST = StageSpec(embedding=True, layers=range(1), head=False)
MIDDLE = StageSpec(embedding=False, layers=range(1, 2), head=False)
LAST = StageSpec(embedding=False, layers=range(2, 2), head=True)


@pytest.mark.parametrize("dp", [1, 4, 7])
def test_entries_lie_end_to_end_in_a_length_that_the_group_divides(dp: int) -> None:
    (bucket,) = buckets_of({1: stage(MIDDLE)}, dp=dp)
    assert bucket.entries[0].start == 0
    assert all(b.start in (a.stop, aligned(a.stop)) for a, b in itertools.pairwise(bucket.entries))
    assert all(entry.stop - entry.start == entry.spec.numel for entry in bucket.entries)
    assert 0 <= bucket.numel - bucket.entries[-1].stop < dp * ALIGNMENT
    assert bucket.numel % (dp * ALIGNMENT) == 0
    assert len({entry.spec.name for entry in bucket.entries}) == 12


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("copies", [3, 5, 6])
def test_ranks_that_update_the_same_slice_share_out_all_of_it(shards: int, copies: int) -> None:
    """Whatever their number is, as with ZeRO-0 and hybrid shards, each counts an equal part."""
    counted: list[int] = []
    for index, copy in itertools.product(range(shards), range(copies)):
        parameters = list(owned_parameters(stage(MIDDLE)))
        axes = group(shards, index), group(copies, copy)
        bucket = Bucket(1, parameters, axes[0], torch.device("cpu"), replicate=axes[1])
        shard = Shard(bucket, group(2))
        assert (shard.own_stop - shard.own_start) % ALIGNMENT == 0
        counted += range(shard.own_start, shard.own_stop)
    assert counted == list(range(bucket.numel))
    assert bucket.numel >= bucket.entries[-1].stop


def test_segments_have_equal_properties_and_cover_every_parameter() -> None:
    (bucket,) = buckets_of({1: stage(MIDDLE)})
    segments = list(bucket.segments())
    assert segments[0].start == 0
    assert segments[-1].stop == bucket.entries[-1].stop
    assert all(b.start == aligned(a.stop) for a, b in itertools.pairwise(segments))
    kinds = []
    for here in segments:
        inside = [e.spec for e in bucket.entries if here.start <= e.start and e.stop <= here.stop]
        ((decay, split),) = {(spec.decay, spec.split) for spec in inside}
        assert (here.decay, here.counted) == (decay, split), "a second tp rank counts no copies"
        kinds.append((decay, split))
        matrices = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
        assert all(decay == spec.name.endswith(matrices) for spec in inside)
    assert kinds == [(True, True), (False, True), (False, False)], "decay first, split first"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_and_main_gradients_are_views_of_the_buffers(dtype: torch.dtype) -> None:
    module = stage(MIDDLE, dtype=dtype)
    (bucket,) = buckets_of({1: module})
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


@pytest.mark.parametrize("chunk_mib", [None, 1e-6])
def test_no_two_buckets_of_a_stage_begin_at_the_same_place(chunk_mib: float | None) -> None:
    """Of experts, of frozen weights, of pieces that are reduced apart: values are rounded by random
    numbers of their places."""
    moe = MoEConfig(experts=2, every=2, ffn=8, group_top_k=1)
    model = MODEL.model_copy(update={"moe": moe, "layers": 3})
    spec = StageSpec(embedding=False, layers=range(3), head=False)
    module = GPTStage(model, spec, Sharding(group(1), False, torch.bfloat16))
    owned = list(owned_parameters(module))
    for each in owned[:4]:
        cast(Any, each.parameter).spec = replace(spec_of(each.parameter), frozen=True)
    buckets = buckets_of({0: module}, policy=ZeroPolicy(chunk_mib=chunk_mib))
    assert {(bucket.experts, bucket.frozen) for bucket in buckets} == {
        *((False, False), (True, False), (False, True))
    }
    assert len(buckets) == 3 if chunk_mib is None else len(buckets) > 4
    places = sorted((bucket.start, bucket.start + bucket.entries[-1].stop) for bucket in buckets)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))


def test_a_bucket_per_stage_and_one_for_the_tied_embedding() -> None:
    buckets = buckets_of({2: stage(LAST), 0: stage(FIRST)})
    assert [bucket.index for bucket in buckets] == [0, 2, 3], "the tied one comes last"
    names = [{entry.spec.name for entry in bucket.entries} for bucket in buckets]
    assert WORD not in names[0] | names[1]
    assert names[2] == {WORD}
    assert names[1] == {"final_norm.weight", "final_norm.bias"}


def test_a_tied_embedding_on_one_rank_is_one_entry_with_two_gradients() -> None:
    modules = {0: stage(FIRST), 2: stage(LAST)}
    *_, tied = buckets_of(modules)
    embedding, head = modules[0].embedding, modules[2].head
    assert embedding is not None
    assert head is not None
    assert len(tied.entries) == 1
    assert len(tied.grads) == 2
    assert embedding.weight.data_ptr() == head.weight.data_ptr(), "one copy of the weights"
    main_grad(embedding.weight).fill_(1)
    main_grad(head.weight).fill_(2)
    assert tied.grads[0][: tied.entries[0].stop].eq(1).all(), "each use has its own gradient"
    tied.add_uses()
    assert main_grad(embedding.weight).eq(3).all()
    tied.zero_grad()
    assert not any(grad.any() for grad in tied.grads)


@pytest.mark.parametrize("spec", [FIRST, LAST], ids=["first", "last"])
def test_a_holder_of_one_use_has_one_gradient(spec: StageSpec) -> None:
    *_, tied = buckets_of({0: stage(spec)})
    assert [entry.spec.name for entry in tied.entries] == [WORD]
    assert len(tied.grads) == 1


def test_untied_embedding_and_head_stay_with_their_stages() -> None:
    modules = {0: stage(FIRST, tied=False), 2: stage(LAST, tied=False)}
    buckets = buckets_of(modules)
    assert [bucket.index for bucket in buckets] == [0, 2]
    assert [len(bucket.grads) for bucket in buckets] == [1, 1]
    assert WORD in {entry.spec.name for entry in buckets[0].entries}
    assert "head.weight" in {entry.spec.name for entry in buckets[1].entries}


def test_a_stage_without_parameters_of_its_own_has_no_bucket() -> None:
    module = stage(StageSpec(embedding=False, layers=range(1, 1), head=False))
    assert buckets_of({1: module}) == []


def test_where_every_stage_has_one_holder_no_group_is_made() -> None:
    mesh = FakeMesh(dp=2)
    buckets = buckets_of({0: stage(FIRST), 2: stage(LAST)}, mesh=mesh)
    assert all(bucket.shard is mesh.dp for bucket in buckets)
    assert mesh.made == []


def test_a_replicated_stage_shares_its_bucket_with_all_its_holders() -> None:
    """Two pipelines in opposite directions: this rank holds a stage of each."""
    mesh = FakeMesh(dp=2)
    modules = {0: stage(FIRST), 2: stage(LAST)}
    first, last, tied = buckets_of(modules, mesh=mesh, holders=((0, 3), (1, 2), (3, 0)))
    assert mesh.made == [(0, 1, 6, 7)], "dp x holders, and one group for the same holders"
    assert first.shard is last.shard is tied.shard
    assert first.shard.size == 4
    assert first.numel % 4 == 0


def test_stages_with_other_holders_have_a_group_of_their_own() -> None:
    mesh = FakeMesh(dp=1)
    modules = {0: stage(FIRST), 1: stage(MIDDLE), 2: stage(LAST)}
    first, middle, last, tied = buckets_of(modules, mesh=mesh, holders=((0, 3), (0,), (0, 2)))
    assert mesh.made == [(0, 3), (0, 2), (0, 2, 3)]
    assert (first.shard.ranks, last.shard.ranks) == ((0, 3), (0, 2))
    assert middle.shard.size == 1
    assert tied.shard.ranks == (0, 2, 3), "those of the first and of the last stage, once each"


@pytest.mark.parametrize(("first", "last"), [((0,), (3,)), ((3,), (0,)), ((0, 3), (3, 0))])
def test_the_tied_embedding_is_shared_by_the_holders_of_both_ends(
    first: tuple[int, ...], last: tuple[int, ...]
) -> None:
    mesh = FakeMesh(dp=2)
    module = {0: stage(FIRST)} if 0 in first else {2: stage(LAST)}
    *_, tied = buckets_of(module, mesh=mesh, holders=(first, (1,), last))
    assert tied.shard.ranks == (0, 1, 6, 7)
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
    policy = ZeroPolicy(chunk_mib=1e-6)
    assert len(buckets_of({1: stage(MIDDLE)}, dp=1, policy=policy)) == 1
    cut_up = buckets_of({1: stage(MIDDLE)}, dp=2, policy=policy)
    first = [bucket.entries[0].spec.name.split(".", 2)[2] for bucket in cut_up]
    assert first == ["mlp.down.weight", "attention.qkv.weight", "attention.qkv.bias"], (
        "the others begin at no multiple of the alignment"
    )
    assert {bucket.index for bucket in cut_up} == {1}
    shared = buckets_of({1: stage(MIDDLE)}, dp=2, holders=((0,), (0, 1), (1,)), policy=policy)
    assert len(shared) == 1
