"""A sequence in slices gives what it gives whole."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.engine.stage import Stage
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.layers.dropout import dropout_seed
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.rng import seed_of
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_pipeline, new_stage

LENGTH = 8


def model_of(kind: str, kv_heads: int | None, dropout: float = 0.0) -> ModelConfig:
    case = Case(model=kind, kv_heads=kv_heads, tied=False, layers=3, dropout=dropout)
    return configure(case)[0].model


def batches(model: ModelConfig, count: int) -> list[MicroBatch]:
    """Draw micro-batches of two sequences each, with one denominator."""
    rows = [reference.random_batch(model, 2, LENGTH, seed=i, masked=0.3) for i in range(count)]
    total = sum(int(mask.sum()) for _, _, mask in rows)
    return [
        MicroBatch(i, 0, 1, tokens, labels, mask, scale=1 / total)
        for i, (tokens, labels, mask) in enumerate(rows)
    ]


def cut(mb: MicroBatch, lengths: Sequence[int]) -> list[MicroBatch]:
    assert mb.tokens is not None
    assert mb.labels is not None
    assert mb.mask is not None
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        replace(
            mb,
            tokens=mb.tokens[:, start : start + n],
            labels=mb.labels[:, start : start + n],
            mask=mb.mask[:, start : start + n],
            start=start,
            sequence_length=sum(lengths),
        )
        for start, n in zip(starts, lengths, strict=True)
    ]


def forward(stages: Sequence[Stage], key: tuple[int, int], mb: MicroBatch) -> None:
    x = None
    for stage in stages:
        x = stage.forward(key, x, mb)


def backward(stages: Sequence[Stage], key: tuple[int, int]) -> None:
    grad = None
    for stage in reversed(stages):
        grad = stage.input_grad(key, grad)


LENGTHS = [(8,), (4, 4), (3, 4, 1), (1, 1, 6), (1,) * 8]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("kind", "kv_heads"), [("gpt2", None), ("llama", 2), ("mixed", 1)])
def test_losses_and_gradients_are_those_of_whole_sequences(
    kind: str, kv_heads: int | None, lengths: tuple[int, ...]
) -> None:
    check_whole_sequences(kind, kv_heads, lengths, frozenset())


@pytest.mark.parametrize("modules", [{"block"}, {"attention"}, {"norm", "mlp_activation"}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_slices_that_are_run_again(lengths: tuple[int, ...], modules: set[str]) -> None:
    check_whole_sequences("llama", 2, lengths, frozenset(modules))


def check_whole_sequences(
    kind: str, kv_heads: int | None, lengths: tuple[int, ...], again: frozenset[str]
) -> None:
    model = model_of(kind, kv_heads)
    params = reference.init_random(model, seed=3)
    stages, buckets = new_pipeline(model, params, (1, 2))
    for stage, layers in zip(stages, (1, 2), strict=True):
        stage.module.layers.use([BlockSpan(layers, BlockPolicy(recompute=again))])
    whole = batches(model, 2)
    parts = [cut(mb, lengths) for mb in whole]
    keys = list(itertools.product(range(2), range(len(lengths))))
    for i, j in sorted(keys, key=lambda key: key[1]):  # two micro-batches in turn
        forward(stages, (i, j), parts[i][j])
    for i, j in sorted(keys, key=lambda key: -key[1]):
        backward(stages, (i, j))
    for key in keys:
        for stage in stages:
            stage.weight_grad(key)
    rows = [torch.cat([getattr(mb, what) for mb in whole]) for what in ("tokens", "labels", "mask")]
    loss, grads = reference.loss_and_grads(params, model, (rows[0], rows[1], rows[2]))
    sums = stages[-1].loss_sums
    assert set(sums) == set(keys)
    assert abs(sum(total.item() for total in sums.values()) * whole[0].scale - loss) < 1e-12
    reference.assert_grads_close(main_grads(buckets), grads)


def test_a_slice_frees_its_graph_and_the_first_one_the_carry() -> None:
    model = model_of("llama", 2)
    stage, _ = new_stage(model, reference.init_random(model, seed=3))
    parts = cut(batches(model, 1)[0], (4, 4))
    for j, part in enumerate(parts):
        stage.forward((0, j), None, part)
    (cache,) = stage._caches.values()
    kept = weakref.ref(cache)
    del cache
    for j in (1, 0):
        assert kept() is not None
        stage.input_grad((0, j), None)
        stage.weight_grad((0, j))
    assert kept() is None
    assert not stage._in_flight


def test_beginning_forgets_the_carry_of_an_unfinished_step() -> None:
    model = model_of("llama", 2)
    stage, _ = new_stage(model, reference.init_random(model, seed=3))
    stage.forward((0, 0), None, cut(batches(model, 1)[0], (4, 4))[0])
    assert stage._caches
    stage.begin(train=True)
    assert not stage._caches


def test_keys_and_values_are_kept_once() -> None:
    """Attention of every slice reads one buffer per layer; nothing is copied per slice."""
    model = model_of("gpt2", None)
    stage, _ = new_stage(model, reference.init_random(model, seed=3))
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 4 and tensor.dim() == 4:  # [b, heads, s, head_dim]
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for j, part in enumerate(cut(batches(model, 1)[0], (2, 2, 2, 2))):
            stage.forward((0, j), None, part)
    (cache,) = stage._caches.values()
    buffers = [rows.values for pair in cache._rows.values() for rows in pair]
    assert len(buffers) == 2 * model.layers
    for buffer in buffers:
        assert seen[buffer.untyped_storage().data_ptr()] == buffer.nbytes == 8 * 2 * LENGTH * 16


def test_slices_and_parts_draw_their_own_random_numbers() -> None:
    whole = MicroBatch(index=3, step=2, seed=1)
    assert dropout_seed(whole, "mlp_out", 4, 5) == seed_of(1, "mlp_out", 2, 3, 4, 5)
    others = [
        replace(whole, start=4),
        replace(whole, first_row=4),
        replace(whole, first_row=4, start=4),
    ]
    assert len({dropout_seed(mb, "mlp_out", 4, 5) for mb in [whole, *others]}) == 4


def test_what_a_stage_refuses() -> None:
    model = model_of("gpt2", None)
    params = reference.init_random(model, seed=3)
    mb = batches(model, 1)[0]
    stage, _ = new_stage(model, params)
    with pytest.raises(AssertionError, match="slice 1 is of a sequence whose length is not given"):
        stage.forward((0, 1), None, mb)
    recomputing, _ = new_stage(model, params, recompute=True)
    with pytest.raises(AssertionError, match="whole sequences only"):
        recomputing.forward((0, 0), None, cut(mb, (4, 4))[0])
