"""What the slices of a sequence hold, size by size, is what the formula says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from megapipe.model.gpt.saved import Sizes, cache_bytes, cache_gradients, held, held_tensors

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layers.policy import BlockPolicy, Span
from megapipe.model.partition import StageSpec
from tests.parity import reference
from tests.parity.live_storages import measure_slices
from tests.parity.marks import in_parts
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import new_stage

LAYERS, ROWS = 2, 2
MIDDLE = StageSpec(embedding=False, layers=range(LAYERS), head=False)
WHOLE_BLOCKS = BlockPolicy(recompute=frozenset({"block"}))
POLICIES = {
    "keep": [Span(LAYERS, BlockPolicy())],
    "full": [Span(1, WHOLE_BLOCKS)] * LAYERS,
    "full, together": [Span(LAYERS, WHOLE_BLOCKS)],
    "attention": [Span(LAYERS, BlockPolicy(recompute=frozenset({"attention"})))],
    "the rest": [Span(LAYERS, BlockPolicy(recompute=frozenset({"norm", "mlp_activation"})))],
    "one of two": [Span(1, BlockPolicy(recompute=frozenset({"norm"}))), Span(1, BlockPolicy())],
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {"kv_heads": 2, "dropout": 0.1}),
    ("gpt2", {"dropout": 0.1}),
    ("llama", {}),
    ("llama", {"kv_heads": 2, "dtype": "fp32"}),
    ("llama", {"kv_heads": 1}),
    ("mixed", {"kv_heads": 1, "dtype": "bf16"}),
    ("mixed", {"dropout": 0.1, "dtype": "bf16"}),
    ("qwen", {"kv_heads": 2}),
    ("neox", {}),
    ("bloom", {"kv_heads": 2}),
    ("gemma", {}),
]


@pytest.mark.parametrize("lengths", [(3, 4, 1), (4, 4)])
@in_parts("policy", POLICIES, default=6, full=3)
@in_parts(("kind", "fields"), MODELS, default=2)
def test_storages_are_those_of_the_formula(
    kind: str, fields: dict[str, Any], policy: str, lengths: tuple[int, ...]
) -> None:
    model = configure(Case(model=kind, tied=False, layers=LAYERS, **fields))[0].model
    spans, length = POLICIES[policy], sum(lengths)
    stage, _ = new_stage(model, reference.init_random(model, seed=3), MIDDLE, spans=spans)
    starts = [sum(lengths[:j]) for j in range(len(lengths))]
    whole = MicroBatch(0, 0, 1, None, None, None, scale=1.0, sequence_length=length)
    inputs = [torch.randn(n, ROWS, model.hidden).to(TORCH_DTYPES[model.dtype]) for n in lengths]
    slices = [replace(whole, start=start) for start in starts]
    moments = iter(measure_slices(stage, inputs, slices))

    sizes = [Sizes(n, ROWS, before=start) for n, start in zip(lengths, starts, strict=True)]
    own = [[t.bytes for t, _ in held_tensors(model, spans, each)] for each in sizes]
    buffers = 2 * LAYERS  # of keys and of values
    cache = [cache_bytes(model, LAYERS, Sizes(length, ROWS)) // buffers] * buffers
    alive = cache
    for saved in own:
        alive = alive + saved
        assert next(moments) == sorted(alive)
    for j in reversed(range(len(lengths))):
        alive = []
        if j:
            left = cache_gradients(model, LAYERS, sizes[j])
            alive = [*cache, *[left // buffers] * buffers, *itertools.chain(*own[:j])]
        assert sum(next(moments)) == sum(alive) + held(model, spans, sizes[j]).queued
        assert next(moments) == sorted(alive)
    assert next(moments, None) is None
