"""The bytes of published formulas, and of slices by hand."""

from __future__ import annotations

from typing import Any

import pytest
from megapipe.model.gpt.saved import (
    Sizes,
    cache_bytes,
    cache_gradients,
    held,
    held_tensors,
    queued_bytes,
    saved_tensors,
)

from megapipe.layers.policy import BlockPolicy, Span
from megapipe.model.gpt.config import ModelConfig

ALL = frozenset({"norm", "attention", "mlp_activation"})
KEEP, FULL = BlockPolicy(), BlockPolicy(recompute=frozenset({"block"}))
SELECTIVE = BlockPolicy(recompute=ALL)

GPT3 = ModelConfig(layers=96, hidden=12288, heads=96, dropout=0.1, dtype="bf16").resolved(
    vocab_size=50257, sequence_length=2048
)
SBH = 2048 * 12288


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "bytes_per_value"),
    [(1, False, 34), (8, False, 10 + 24 / 8), (8, True, 34 / 8)],
)
def test_a_layer_keeps_what_the_papers_say(
    tp: int, sequence_parallel: bool, bytes_per_value: float
) -> None:
    """Korthikanti et al. (2205.05198), equations 1 to 4: without scores, which fused attention
    does not keep, and norm statistics and logsumexp, which they leave out."""
    sizes = Sizes(2048, 1, tp=tp, sequence_parallel=sequence_parallel, cuda=True)
    ours = sum(
        tensor.bytes
        for tensor in saved_tensors(GPT3, sizes)
        if tensor.name not in ("mean", "rstd", "logsumexp")
    )
    assert ours == bytes_per_value * SBH


@pytest.mark.parametrize("tp", [1, 8])
def test_a_layer_of_llama_70b_keeps_33_and_a_half_bytes_per_value(tp: int) -> None:
    """Two norms 4 + 4; queries, keys and values 2.5, attention's output 2; the MLP's two wide
    inputs 14 and the narrow one 7: nothing twice, whether keys are copied (tp 1) or viewed."""
    llama = ModelConfig(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn_hidden=28672,
        norm="rmsnorm",
        positions="rotary",
        activation="swiglu",
        dtype="bf16",
    ).resolved(vocab_size=128256, sequence_length=4096)
    sizes = Sizes(4096, 1, tp=tp, sequence_parallel=tp > 1, cuda=True)
    saved = [tensor for tensor in saved_tensors(llama, sizes) if tensor.is_saved]
    ours = sum(tensor.bytes for tensor in saved if tensor.name not in ("rstd", "logsumexp"))
    assert ours == 33.5 * 4096 * 8192 / tp


def test_full_recomputation_keeps_inputs() -> None:
    sizes = Sizes(2048, 1, tp=8, sequence_parallel=True, cuda=True)
    full = [Span(1, FULL)] * 3
    assert held(GPT3, full, sizes)[:2] == (3 * 2 * SBH / 8, 0)
    assert held(GPT3, [Span(3, FULL)], sizes)[:2] == (2 * SBH / 8, 0)
    away = BlockPolicy(recompute=FULL.recompute, offload=FULL.recompute)
    assert held(GPT3, [Span(1, away)] * 3, sizes)[:2] == (0, 3 * 2 * SBH / 8)


def test_selective_recomputation_keeps_what_the_linear_layers_make() -> None:
    """Two residuals, q, k and v, and the wide values: 2 + 3 + 4 of h per token."""
    assert held(GPT3, [Span(2, SELECTIVE)], Sizes(2048, 1, cuda=True))[:2] == (2 * 9 * 2 * SBH, 0)
    names = [tensor.name for tensor, _ in held_tensors(GPT3, [Span(1, SELECTIVE)], Sizes(8, 1))]
    assert names == ["input", "qkv", "input", "up"]


def test_what_waits_for_the_weight_gradients() -> None:
    """Inputs 1 + 1 + 1 + 4 and output gradients 3 + 1 + 4 + 1 of h per token."""
    assert queued_bytes(GPT3, Sizes(2048, 1)) == 16 * 2 * SBH
    split = Sizes(2048, 1, tp=8, sequence_parallel=True)
    assert queued_bytes(GPT3, split) == 16 * 2 * SBH / 8
    replicated = Sizes(2048, 1, tp=8)
    assert queued_bytes(GPT3, replicated) == (12 / 8 + 4) * 2 * SBH
    for policy in (KEEP, FULL, SELECTIVE):
        assert held(GPT3, [Span(2, policy)], split).queued == 2 * queued_bytes(GPT3, split)


def test_the_slices_of_a_sequence_and_their_carry() -> None:
    """On a GPU a slice keeps what its own tokens do, and the cache their keys and values again:
    2 + 2 bytes of h, whose gradients take 4 + 4."""
    cached = cache_bytes(GPT3, 3, Sizes(2048, 1, tp=8, cuda=True))
    assert cached == 3 * 4 * SBH / 8
    whole = held(GPT3, [Span(3, KEEP)], Sizes(2048, 1, tp=8, cuda=True))
    parts = [
        held(GPT3, [Span(3, KEEP)], Sizes(n, 1, tp=8, cuda=True, before=before))
        for n, before in ((1000, 0), (600, 1000), (448, 1600))
    ]
    assert [sum(each) for each in zip(*parts, strict=True)] == list(whole)
    left = cache_gradients(GPT3, 3, Sizes(600, 1, tp=8, cuda=True, before=1000))
    assert left == 3 * 8 * 1600 * 12288 / 8


def slice_names(**fields: Any) -> dict[str, int]:
    """Bytes of what attention keeps on the CPU of the second slice, of 3 tokens after 5."""
    model = ModelConfig(layers=1, hidden=8, heads=4, dtype="bf16", **fields)
    saved = saved_tensors(model.resolved(vocab_size=32, sequence_length=8), Sizes(3, 2, before=5))
    return {t.name: t.bytes for t in saved if t.module == "attention" and t.is_saved}


def test_attention_of_a_slice_by_hand() -> None:
    """Of 8 values in bf16 per token and 2 rows; queries alone hold on to what they are part of."""
    output = {"logsumexp": 3 * 2 * 4 * 4, "output": 3 * 2 * 8 * 2}
    mask = {"causal mask": 3 * 8 * 2}
    assert slice_names() == {"qkv": 3 * 2 * 24 * 2, **mask, **output}
    assert slice_names(positions="rotary") == slice_names()
    queries = {"queries": 3 * 2 * 8 * 2}
    for positions in ("learned", "rotary"):
        found = slice_names(positions=positions, kv_heads=2)
        assert found == {**queries, **mask, **output}
    scores = 3 * 8 * 2 * 4 * 4
    assert slice_names(dropout=0.1) == {
        "scaled queries": 3 * 2 * 8 * 4,
        "scaled keys, one per query": 8 * 2 * 8 * 4,
        "values, one per query": 8 * 2 * 8 * 4,
        "weights": scores,
        "mask": scores,
        "dropped weights": scores,
        "output": output["output"],
        "residual mask": 3 * 2 * 8 * 2,
    }
