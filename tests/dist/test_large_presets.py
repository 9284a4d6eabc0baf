"""The largest presets, scaled down, in their layouts: they compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megapipe.cli import parse
from megapipe.testing import World, run_world
from tests.parity import named_settings
from tests.parity.ranks import Case, Outcome, check_case, run_case

CONFIGS = Path(__file__).parents[2] / "configs"
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


def models() -> Any:
    """What the presets' models are besides their sizes."""
    found = {}
    for name in ("mt_nlg_530b", "bloom_176b"):
        fields = parse([str(CONFIGS / f"{name}.yaml")]).config.model.model_dump()
        found[name] = {key: v for key, v in fields.items() if key not in (*SIZES, *OWN)}
    return mock.patch.dict(named_settings.MODELS, found)


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
