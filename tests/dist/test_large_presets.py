"""The largest presets, scaled down, in their layouts: they compute what one process does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megapipe.cli import parse
from megapipe.testing import World, run_world
from tests.parity import named_settings
from tests.parity.ranks import Case, Outcome, check_case, run_case
from tests.parity.tiers import one_of

CONFIGS = Path(__file__).parents[2] / "configs"
DENSE = ("mt_nlg_530b", "bloom_176b")
MIXTURES = {
    "gpt2_switch": {"num_experts": 8},
    "mixtral_8x7b": {"num_experts": 4},
    "qwen3_30b_a3b": {"num_experts": 8, "top_k": 3, "expert_ffn_hidden": 12},
}
"""Presets with experts, and their fields that get sizes for a case."""
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")
OWN = ("vocab_size", "max_positions", "dtype", "tied_embeddings", "dropout", "source", "options")
"""Fields that a case has of its own."""

MT_NLG = Case(tp=2, pp=4, m=3, model="mt_nlg_530b", activations="full", sequence_parallel=True)
BLOOM = Case(
    tp=2,
    pp=2,
    dp=2,
    m=3,
    schedule="zb_v",
    model="bloom_176b",
    sequence_parallel=True,
    heads=6,
    steps=4,
)
SWITCH = Case(dp=8, ep=8, m=2, model="gpt2_switch", moe="gpt2_switch")
MIXTRAL = Case(
    tp=2,
    pp=2,
    dp=2,
    ep=4,
    m=4,
    layers=4,
    schedule="interleaved_1f1b",
    chunks=2,
    model="mixtral_8x7b",
    moe="mixtral_8x7b",
    sequence_parallel=True,
)
QWEN3 = Case(
    tp=2, dp=4, ep=8, m=2, model="qwen3_30b_a3b", moe="qwen3_30b_a3b", sequence_parallel=True
)


def models() -> Any:
    """Patch in what the presets' models are besides their sizes."""
    found, experts = {}, {}
    for name in (*DENSE, *MIXTURES):
        fields = parse([str(CONFIGS / f"{name}.yaml")]).config.model.model_dump()
        experts[name] = fields.pop("moe") | MIXTURES.get(name, {})
        found[name] = {key: v for key, v in fields.items() if key not in (*SIZES, *OWN)}
    patches = ExitStack()
    patches.enter_context(mock.patch.dict(named_settings.MODELS, found))
    patches.enter_context(mock.patch.dict(named_settings.MOE, experts))
    return patches


def run(world: World, chosen: list[Case]) -> list[Outcome]:
    with models():
        return [run_case(world, case) for case in chosen]


@pytest.mark.full
def test_scaled_down() -> None:
    """MT-NLG over 2 x 4; BLOOM, whose heads are no power of two, with ZeRO-1 inside of both, exact
    and in bf16 with gradients added up in fp32."""
    bf16 = Case(**{**vars(BLOOM), "dtype": "bf16"})
    results = run_world(8, run, [MT_NLG, BLOOM, bf16], timeout_s=200)
    with models():
        for i, case in enumerate((MT_NLG, BLOOM)):
            check_case(case, [outcomes[i] for outcomes in results])
    _, exact, rounded = results[0]
    assert len(exact.losses) == BLOOM.steps
    assert rounded.losses == pytest.approx(exact.losses, rel=0.01)


@one_of(3)
def test_experts_scaled_down(some: slice) -> None:
    """Experts over dp, and over dp x tp, as in the presets."""
    cases = [SWITCH, MIXTRAL, QWEN3][some]
    results = run_world(8, run, cases, timeout_s=200)
    with models():
        for i, case in enumerate(cases):
            check_case(case, [outcomes[i] for outcomes in results])
