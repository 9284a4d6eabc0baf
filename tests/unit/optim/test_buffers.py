"""Flat buffers: every parameter's place, the regions of equal properties, the tied embedding."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.engine.weight_grad import main_grad
from megapipe.mesh import Axis
from megapipe.model.config import ModelConfig
from megapipe.model.gpt import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, main_dtype, make_buckets
from megapipe.tensor_parallel.parameter import Sharding, spec_of

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


def buckets_of(modules: dict[int, GPTStage], *, dp: int = 4, tied: bool = True) -> list[Bucket]:
    mesh: Any = SimpleNamespace(dp=group(dp), device=torch.device("cpu"))
    return make_buckets(modules, mesh, stages=3, tied=tied, holders=[0])


FIRST = StageSpec(embedding=True, layers=range(1), head=False)
MIDDLE = StageSpec(embedding=False, layers=range(1, 2), head=False)
LAST = StageSpec(embedding=False, layers=range(2, 2), head=True)


@pytest.mark.parametrize("dp", [1, 4, 7])
def test_entries_lie_end_to_end_in_a_length_that_the_group_divides(dp: int) -> None:
    (bucket,) = buckets_of({1: stage(MIDDLE)}, dp=dp)
    assert bucket.entries[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(bucket.entries))
    assert all(entry.stop - entry.start == entry.spec.numel for entry in bucket.entries)
    assert 0 <= bucket.numel - bucket.entries[-1].stop < dp
    assert bucket.numel % dp == 0
    assert len({entry.spec.name for entry in bucket.entries}) == 12


def test_regions_have_equal_properties_and_cover_every_parameter() -> None:
    (bucket,) = buckets_of({1: stage(MIDDLE)})
    regions = list(bucket.regions())
    kinds = [(region.decay, region.split) for region in regions]
    assert kinds == [(True, True), (False, True), (False, False)], "decay first, split first"
    assert regions[0].start == 0
    assert regions[-1].stop == bucket.entries[-1].stop
    assert all(a.stop == b.start for a, b in itertools.pairwise(regions))
    for entry in bucket.entries:
        (home,) = [r for r in regions if r.start <= entry.start and entry.stop <= r.stop]
        assert (
            home.decay
            == entry.spec.decay
            == entry.spec.name.endswith(
                (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
            )
        )
        assert home.split == (entry.spec.split_dim is not None)


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
    buckets = buckets_of(modules, tied=False)
    assert [bucket.index for bucket in buckets] == [0, 2]
    assert [len(bucket.grads) for bucket in buckets] == [1, 1]
    assert WORD in {entry.spec.name for entry in buckets[0].entries}
    assert "head.weight" in {entry.spec.name for entry in buckets[1].entries}


def test_a_stage_without_parameters_of_its_own_has_no_bucket() -> None:
    module = stage(StageSpec(embedding=False, layers=range(1, 1), head=False))
    assert buckets_of({1: module}) == []
