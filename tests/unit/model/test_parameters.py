"""Parameter counts: against literal shapes, and against the real modules."""

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis
from megapipe.layers.activation_policy import padded_vocabulary
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import parse_layout
from tests.parity.families import count, count_held, shapes_of

MODELS = {
    "gpt2": ModelConfig(layers=3, hidden=48, heads=4, vocab_size=101),
    "plain": ModelConfig(layers=3, hidden=48, heads=4, bias=False, tied_embeddings=False),
    "llama": ModelConfig(
        layers=3,
        hidden=48,
        heads=8,
        kv_heads=4,
        head_dim=10,
        norm="rmsnorm",
        positions="rotary",
        activation="swiglu",
        bias=False,
        tied_embeddings=False,
    ),
    "mixed": ModelConfig(
        layers=3, hidden=48, heads=8, kv_heads=4, norm="rmsnorm", activation="swiglu"
    ),
}


def resolved(name: str) -> ModelConfig:
    return MODELS[name].resolved(vocab_size=101, sequence_length=32)


def test_shapes_of_a_small_gpt2() -> None:
    model = ModelConfig(layers=1, hidden=8, heads=2).resolved(vocab_size=11, sequence_length=5)
    assert shapes_of(model) == {
        "embedding.word.weight": (11, 8),
        "embedding.position.weight": (5, 8),
        "layers.0.attention_norm.weight": (8,),
        "layers.0.attention_norm.bias": (8,),
        "layers.0.attention.qkv.weight": (24, 8),
        "layers.0.attention.qkv.bias": (24,),
        "layers.0.attention.out.weight": (8, 8),
        "layers.0.attention.out.bias": (8,),
        "layers.0.mlp_norm.weight": (8,),
        "layers.0.mlp_norm.bias": (8,),
        "layers.0.mlp.up.weight": (32, 8),
        "layers.0.mlp.up.bias": (32,),
        "layers.0.mlp.down.weight": (8, 32),
        "layers.0.mlp.down.bias": (8,),
        "final_norm.weight": (8,),
        "final_norm.bias": (8,),
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_modules(name: str, tp: int) -> None:
    """Names, global shapes and local sizes of every stage are those of the built model."""
    model = resolved(name)
    for stage in (*parse_layout("E L | L | L H", 3), *parse_layout("E L*3 H", 3)):
        sharding = Sharding(Axis(tp, 0, tuple(range(tp)), None), False, torch.float32)
        specs = {s.name: s for s in map(spec_of, GPTStage(model, stage, sharding).parameters())}
        assert {s.name: s.shape for s in specs.values()} == shapes_of(model, stage)
        assert sum(s.numel for s in specs.values()) == count_held(model, [stage], tp)


def test_stages_add_up() -> None:
    """Over all stages every parameter is counted once, a tied matrix once more."""
    for name in MODELS:
        model = resolved(name)
        stages = parse_layout("E L*2 | L H", 3)
        total = sum(count(model, stage) for stage in stages)
        copies = 101 * 48 if model.tied_embeddings else 0
        assert total == count(model) + copies
        assert count_held(model, stages, tp=1) == (
            count(model)
            + (padded_vocabulary(101, 1) - 101) * 48 * (1 if model.tied_embeddings else 2)
        )


@pytest.mark.parametrize(
    ("vocabulary", "tp", "padded"),
    [(257, 1, 384), (257, 2, 512), (50257, 1, 50304), (50257, 8, 51200), (32000, 2, 32000)],
)
def test_padded_vocabulary(vocabulary: int, tp: int, padded: int) -> None:
    assert padded_vocabulary(vocabulary, tp) == padded


def test_unresolved_model() -> None:
    with pytest.raises(ValueError, match="not resolved"):
        shapes_of(ModelConfig())
