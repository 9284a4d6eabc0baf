"""Adapters of a GPT: which ones it may have, what they begin with, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.distributed.mesh import Axis
from megapipe.errors import ConfigError
from megapipe.layers.lora_specs import Lora
from megapipe.layers.parameter import Sharding, new_parameter, spec_of
from megapipe.layers.specs import by_name
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.lora import resolved_targets, with_adapters
from megapipe.model.gpt.parameters import stage_parameters
from megapipe.model.partition import StageSpec
from megapipe.plan.memory import model_memory
from megapipe.plan.units import Units
from tests.unit.model.transformers_models import model_of

MIDDLE = StageSpec(embedding=False, layers=range(3), head=False)


def resolved(world: int = 1, **keys: Any) -> tuple[Config, Layout]:
    sections: dict[str, Any] = {"model": {"hidden": 64, "vocab_size": 512}}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return resolve(Config.model_validate(sections), world, 512)


@pytest.mark.parametrize(
    ("case", "targets", "expected"),
    [
        ("gpt2", ["all"], "attention.qkv attention.out mlp.up mlp.down"),
        ("pythia", ["all"], "attention.qkv attention.out mlp.up mlp.down"),
        (
            "llama_gqa",
            ["all"],
            "attention.q attention.k attention.v attention.out mlp.gate mlp.up mlp.down",
        ),
        ("llama_gqa", ["mlp.down", "attention.v", "mlp.down"], "attention.v mlp.down"),
        (
            "llama_gqa",
            ["all", "attention.qkv"],
            "attention.qkv attention.out mlp.gate mlp.up mlp.down",
        ),
    ],
)
def test_all_are_the_layers_of_the_model_s_class(
    case: str, targets: list[str], expected: str
) -> None:
    assert resolved_targets(model_of(case), targets) == expected.split()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"lora__rank": 2, "lora__targets": ["mlp.gate"]},
            "a block has no linear layer mlp.gate: expected all, or some of attention.qkv, ",
        ),
        (
            {"lora__rank": 2, "lora__targets": ["embedding"]},
            "a block has no linear layer embedding",
        ),
        ({"lora__rank": 2, "lora__targets": []}, "lora.targets=[] leaves nothing to train"),
        (
            {"lora__rank": 2, "lora__targets": ["attention.qkv", "attention.k"]},
            "or attention.k, not both",
        ),
        ({"lora__alpha": 3.0}, "lora.alpha=3.0 has no effect without lora.rank: expected 8.0"),
        ({"lora__targets": ["mlp.up"]}, "lora.targets=[mlp.up] has no effect without lora.rank"),
        ({"lora__rank": 2, "kernels__compile": True}, "kernels.compile=true needs lora.rank=null"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def initial(spec: Any, tp: int, index: int) -> Tensor:
    axis = Axis(tp, index, tuple(range(tp)), None)
    local = spec_of(new_parameter(Sharding(axis, False, torch.float64), spec))
    out = torch.full(local.sizes, torch.nan, dtype=torch.float64)
    local.initialise(out, 7)
    return out


def test_initial_values_are_peft_s_and_those_of_any_layout() -> None:
    """Uniform within 1 / sqrt(inputs), and zeros; those of tp ranks are parts of the whole."""
    model = model_of("llama").model_copy(update={"hidden": 1000, "heads": 10, "head_dim": 100})
    given = Lora(70, 1.0, ("attention.q", "attention.out", "mlp.down"))
    specs = by_name(with_adapters(model, stage_parameters(model, MIDDLE), given))
    assert not initial(specs["layers.1.mlp.down.lora_b"], 1, 0).any()
    a = specs["layers.1.attention.out.lora_a"]
    whole = initial(a, 1, 0)
    assert torch.equal(whole, torch.cat([initial(a, 2, i) for i in range(2)], dim=1))
    bound = 1000**-0.5
    assert 0.99 * bound < whole.max() < bound
    assert -bound < whole.min() < -0.99 * bound
    assert whole.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    q = specs["layers.1.attention.q.lora_a"]
    assert torch.equal(initial(q, 2, 1), initial(q, 1, 0)), "every tp rank holds it"
    assert not torch.equal(initial(q, 1, 0), whole)


@pytest.mark.parametrize(
    ("targets", "held", "queued"),
    [
        # beside all inputs and output gradients, products with A [t, 3] and their gradients
        (["all"], 4 * 3, 4 * 2 * 3),
        # without the inputs of qkv and mlp.up: of out it is attention's output, which is kept
        (["mlp.down"], 3 - 2 * 64, -16 * 64 + (4 + 1) * 64 + 2 * 3),
        # without those of mlp.up and mlp.down
        (["attention.qkv"], 3 - (1 + 4) * 64, -16 * 64 + (1 + 3) * 64 + 2 * 3),
    ],
)
def test_a_layer_holds_what_its_adapters_need(targets: list[str], held: int, queued: int) -> None:
    """Values per token by hand, more than where all weights of the layer are trained."""

    def of_layer(**lora: Any) -> tuple[int, int]:
        few, many = (
            Units(*resolved(model__layers=n, model__dtype="bf16", **lora)).of(0)[0] for n in (6, 7)
        )
        return many.held - few.held, many.queued - few.queued

    adapted, plain = of_layer(lora__rank=3, lora__targets=targets), of_layer()
    values = 2 * 256 * 4  # bytes of one per token
    assert [b - a for a, b in zip(plain, adapted, strict=True)] == [values * held, values * queued]


def test_memory_is_that_of_the_weights_and_little_more() -> None:
    """The model has 12 million parameters in bf16; bytes are those of a process of dp 2."""
    keys = {"model__hidden": 512, "model__dtype": "bf16", "parallel__dp": 2}
    keys |= {"model__tied_embeddings": False}
    (config, layout), (given, with_adapters) = (
        resolved(2, **keys),
        resolved(2, **keys, lora__rank=4),
    )
    whole, small = model_memory(config, layout, 0), model_memory(given, with_adapters, 0)
    count = layout.model.num_parameters()
    trained = with_adapters.model.num_parameters(trained=True)
    assert trained == 4 * 4 * 512 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))
    assert 0.99 < whole.gradients / (4 * count) < 1.01
    assert 0.99 < small.gradients / (4 * trained) < 1.01
    assert 0.99 < small.optimizer / (12 * trained / 2) < 1.01
    assert 0.99 < small.parameters / (2 * (count + trained)) < 1.01
    assert small.total < 0.25 * whole.total
    assert layout.model.token_flops() / with_adapters.model.token_flops() == pytest.approx(
        1.5, 0.05
    )
