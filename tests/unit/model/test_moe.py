"""Layers with experts as the plan sees them: parameters, FLOPs, cost, and what is refused."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from megapipe.cli import flatten, parse, stored_model
from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.model_spec import GPTSpec
from megapipe.model.gpt.moe.layers import moe_parameters
from megapipe.model.interface import RunShape
from megapipe.model.partition import StageSpec


def family(fields: dict[str, Any]) -> GPTSpec:
    model = ModelConfig.model_validate(fields).resolved(vocab_size=None, sequence_length=128)
    return GPTSpec(model, RunShape(sequence_length=128, microbatch=1))


MIXTURE = {
    "num_experts": 6,
    "top_k": 2,
    "expert_ffn_hidden": 24,
    "first_dense_layers": 1,
    "layer_freq": 2,
    "shared_ffn_hidden": 8,
}
SMALL = {
    "layers": 5,
    "hidden": 16,
    "heads": 2,
    "vocab_size": 64,
    "moe": MIXTURE,
}


def test_which_layers_have_experts() -> None:
    def found(**keys: object) -> list[int]:
        moe = MoEConfig.model_validate({"num_experts": 4, **keys})
        return list(filter(moe.has_experts, range(6)))

    assert found() == [0, 1, 2, 3, 4, 5]
    assert found(first_dense_layers=1, layer_freq=2) == [2, 4]
    assert found(dense_layers=[0, 3]) == [1, 2, 4, 5]
    assert found(layer_freq=2, dense_layers=[3]) == [1, 5]


def test_a_list_has_a_number_for_each_layer_with_experts() -> None:
    moe = MoEConfig(num_experts=[4, 8, 6], first_dense_layers=1, dense_layers=[3])
    assert [moe.experts_of(layer) for layer in range(5)] == [0, 4, 8, 0, 6]
    assert [MoEConfig(num_experts=4, layer_freq=2).experts_of(layer) for layer in range(4)] == [
        0,
        4,
        0,
        4,
    ]
    assert MoEConfig().experts_of(0) == 0
    model = family({**SMALL, "moe": {**MIXTURE, "num_experts": [6, 8]}})
    assert model.experts() == {2: 6, 4: 8}
    assert "in 2 layers 2 of 6 or 8 experts of 24 beside one of 8" in model.describe()
    for layer, experts in model.experts().items():
        shapes = model.shapes()
        assert shapes[f"layers.{layer}.moe.router.weight"] == (experts, 16)
        assert shapes[f"layers.{layer}.moe.down.weight"] == (experts, 16, 24)


def test_first_choices_are_told_beside_all_where_the_next_step_goes_by_them() -> None:
    def told(**keys: object) -> list[int]:
        model = family({**SMALL, "moe": {**MIXTURE, "num_experts": [6, 8], **keys}})
        assert list(model.routing_stat_counts()) == list(model.experts())
        return list(model.routing_stat_counts().values())

    assert told() == told(aux_loss_scope="step") == told(aux_loss_choices="first") == [10, 12]
    assert told(aux_loss_scope="step", aux_loss_choices="first") == [16, 20]


def test_the_router_begins_smaller_where_that_is_asked_for() -> None:
    """A factor makes the initial weights of the router smaller, and no others."""

    def spreads(**keys: object) -> dict[str, float | None]:
        model = family({**SMALL, "moe": {**MIXTURE, **keys}}).model
        return {spec.name: spec.std for spec in moe_parameters(model, 2)}

    plain, small = spreads(), spreads(router_init_scale=0.1)
    changed = {name for name in plain if plain[name] != small[name]}
    assert changed == {"layers.2.moe.router.weight"}
    assert small[changed.pop()] == pytest.approx(0.1 * 0.02, rel=1e-15)


def test_a_list_of_one_number_over_and_over_is_that_number() -> None:
    """A checkpoint may resume with it, and a Hugging Face class, which has one number, takes it."""
    one, same = (family({**SMALL, "moe": {**MIXTURE, "num_experts": e}}).model for e in (6, [6, 6]))
    assert same == one


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_token_meets_its_share_of_the_experts(activation: str) -> None:
    for experts in (6, [6, 8]):
        model = family(
            {**SMALL, "activation": activation, "moe": {**MIXTURE, "num_experts": experts}}
        )
        unused = 0
        for name, shape in model.shapes().items():
            of_experts = name.split(".")[-3:-1] in (["moe", "up"], ["moe", "down"])
            unused += of_experts * prod(shape) * (shape[0] - 2) // shape[0]
        assert model.active_parameters() == model.num_parameters() - unused


@pytest.mark.parametrize("experts", [6, [6, 8]])
def test_flops_are_those_of_the_experts_of_a_token(experts: Any) -> None:
    """A matrix counts two for each of its values that a token meets; attention's own are added."""
    moe = {"moe": {**MIXTURE, "num_experts": experts}}
    model = family({**SMALL, **moe, "positions": "rotary", "bias": False, "tied_embeddings": False})
    matrices = {name: shape for name, shape in model.shapes().items() if len(shape) > 1}
    met = {}
    for name, shape in matrices.items():
        of_experts = len(shape) == 3
        met[name] = prod(shape) * 2 // shape[0] if of_experts else prod(shape)
    scores = 5 * 2 * 2 * 128 * 16
    assert model.forward_flops(model.whole) == scores + 2 * sum(
        size for name, size in met.items() if not name.startswith("embedding")
    )
    assert model.token_flops() == 3 * model.forward_flops(model.whole), "which MFU is of"
    each = [model.forward_flops(StageSpec(False, range(i, i + 1), False)) for i in range(5)]
    assert each[2] != each[0] == each[1] == each[3]
    assert each[4] - each[2] == 2 * 16 * (model.experts()[4] - 6)
    assert model.unit_costs(None)[1:6] == [3 * flops for flops in each]


def test_layers_are_cut_into_stages_by_their_cost() -> None:
    """A dense layer costs a sixth of one with experts here."""
    given = [
        *("model.layers=9", "model.hidden=64", "model.heads=1", "model.ffn_hidden=16"),
        *("model.moe.num_experts=8", "model.moe.top_k=4", "model.moe.expert_ffn_hidden=128"),
        *("model.moe.first_dense_layers=6", "parallel.pp=2", "train.sequence_length=16"),
        *("model.vocab_size=300", "train.global_batch=8"),
    ]
    _, layout = resolve(parse(given).config, 2, None)
    first, second = layout.stage_layers
    assert len(first.layers) > len(second.layers)


def test_a_layer_with_more_experts_costs_as_much_as_its_router() -> None:
    """A stage therefore has fewer layers with many experts."""
    given = [
        *("model.layers=8", "model.hidden=64", "model.heads=1", "model.vocab_size=300"),
        *(
            "model.moe.expert_ffn_hidden=8",
            "parallel.pp=2",
            "train.sequence_length=16",
            "train.global_batch=8",
        ),
    ]
    few, many = (
        resolve(parse([*given, f"model.moe.num_experts={experts}"]).config, 2, None)[1].stage_layers
        for experts in (4, [4, 4, 4, 4, 4, 400, 400, 400])
    )
    assert len(few[0].layers) < len(many[0].layers)


@pytest.mark.parametrize("experts", ["4", "[4,8]"])
def test_they_are_stored_and_read_back(experts: str) -> None:
    config = parse([f"model.moe.num_experts={experts}", "model.moe.dense_layers=[1,3]"]).config
    assert stored_model(flatten(config)) == config.model
    older = {key: value for key, value in flatten(config).items() if ".moe." not in key}
    assert stored_model(older).moe == MoEConfig()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model.moe.expert_ffn_hidden=8",
         "model.moe.expert_ffn_hidden=8 has no effect without model.moe.num_experts"),
        ("model.moe.num_experts=4 model.moe.top_k=5",
         "top_k=5 is more than model.moe.num_experts=4"),
        (
            "model.moe.num_experts=4 model.moe.num_groups=3 model.moe.topk_groups=1",
            "is not divisible by model.moe.num_groups=3",
        ),
        (
            "model.moe.num_experts=4 model.moe.num_groups=2 model.moe.topk_groups=3",
            "topk_groups=3 is more than model.moe.num_groups=2",
        ),
        (
            ("model.moe.num_experts=8 model.moe.num_groups=4 model.moe.topk_groups=1 "
             "model.moe.top_k=3"),
            "top_k=3 is more than the 2 experts of model.moe.topk_groups=1",
        ),
        ("model.moe.num_experts=4 model.moe.top_k=1", "expected model.moe.norm_topk_prob=false"),
        ("model.moe.num_experts=4 model.moe.first_dense_layers=4", "leave no MoE layer in model.l"),
        (
            "model.moe.num_experts=4 model.moe.dense_layers=[0,4]",
            "model.moe.dense_layers=[0, 4]: there is no layer 4: expected 0 to 3",
        ),
        (
            "model.moe.num_experts=4 model.moe.dense_layers=[0] model.moe.first_dense_layers=1",
            "model.moe.dense_layers=[0]: layer 0 is already dense: remove it",
        ),
        (
            "model.moe.num_experts=4 model.moe.dense_layers=[1,3] model.moe.layer_freq=2",
            "model.moe.dense_layers=[1, 3] leaves no MoE layer: remove some of 1, 3",
        ),
        ("model.moe.num_experts=4 model.moe.layer_freq=5", "leave no MoE layer in model.l"),
        (
            "model.moe.num_experts=4 model.moe.shared_gate=sigmoid",
            "shared_gate=sigmoid has no effect without model.moe.shared_ffn_hidden",
        ),
        (
            "model.moe.num_experts=4 model.moe.drop_policy=score",
            "drop_policy=score has no effect without model.moe.capacity_factor",
        ),
        (
            "model.moe.num_experts=4 model.moe.aux_loss_coeff=0 model.moe.aux_loss_choices=first",
            "aux_loss_choices=first has no effect without model.moe.aux_loss_coeff",
        ),
        (
            "model.moe.num_experts=4 parallel.tp=2",
            "model.moe.num_experts=4 needs parallel.sequence_parallel=true with parallel.tp=2",
        ),
        ("parallel.ep=2", "parallel.ep=2 has no effect without model.moe.num_experts"),
        (
            "model.moe.num_experts=4 parallel.ep=4",
            "parallel.ep=4 does not divide dp 2 x cp 1 x tp 1 = 2: ep could be 1 or 2",
        ),
        (
            "model.moe.num_experts=5 parallel.ep=2",
            "model.moe.num_experts=5 is not divisible by parallel.ep=2: expected a multiple",
        ),
        (
            "model.moe.num_experts=[4,8,5] model.moe.first_dense_layers=1 parallel.ep=2",
            ("model.moe.num_experts=[4, 8, 5] (5 in layer 3) is not divisible by parallel.ep=2: "
             "expect"),
        ),
        (
            "model.moe.num_experts=[4,8,8]",
            "model.moe.num_experts=[4, 8, 8] has 3 numbers: expected 4, one per MoE layer",
        ),
        (
            "model.moe.num_experts=[4,8,8] model.moe.dense_layers=[0,2]",
            "has 3 numbers: expected 2, one per MoE layer (1, 3)",
        ),
        ("model.moe.num_experts=[]",
         "model.moe.num_experts=[] has 0 numbers: expected 4, one per MoE"),
        (
            "model.moe.num_experts=[4,8,2,4] model.moe.top_k=3",
            "top_k=3 is more than model.moe.num_experts=[4, 8, 2, 4] (2 in layer 2): expected at",
        ),
        (
            "model.moe.num_experts=[4,6,4,4] model.moe.num_groups=4 model.moe.topk_groups=1",
            ("experts=[4, 6, 4, 4] (6 in layer 1) is not divisible by model.moe.num_groups=4: "
             "num_groups"),
        ),
        ("parallel.etp=2", "parallel.etp=2 has no effect without model.moe.num_experts"),
        (
            "model.moe.num_experts=4 parallel.ep=2 parallel.etp=2",
            "parallel.ep=2 x parallel.etp=2 does not divide dp 2 x cp 1 x tp 1 = 2: ep x etp",
        ),
        (
            "model.moe.num_experts=4 model.moe.expert_ffn_hidden=9 parallel.etp=2",
            "model.moe.expert_ffn_hidden=9 is not divisible by parallel.etp=2: expected a multiple",
        ),
        (
            "model.moe.num_experts=4 lora.rank=2 model.moe.bias_update_rate=0.1",
            "model.moe.bias_update_rate=0.1 changes router biases, which lora.rank=2 freezes",
        ),
        (
            "model.moe.num_experts=4 lora.rank=2 lora.targets=[mlp.up]",
            "a block has no linear layer mlp.up: expected all, or some of attention.qkv, ",
        ),
        (
            ("model.moe.num_experts=4 lora.rank=2 checkpoint.load=x checkpoint.upcycle=true"),
            "checkpoint.upcycle=true makes new routers, which lora.rank=2 freezes",
        ),
        (
            "model.moe.num_experts=4 model.moe.top_k=3 model.moe.second_expert=random",
            ("model.moe.second_expert=random needs model.moe.top_k=2, not 3: expected "
                "model.moe.second_expert=always, or model.moe.top_k=2"),
        ),
        (
            "model.moe.num_experts=4 model.moe.aux_loss_coeff=0 model.moe.aux_loss_scope=step",
            ("model.moe.aux_loss_scope=step has no effect without model.moe.aux_loss_coeff: "
             "expected sequen"),
        ),
        (
            ("model.moe.num_experts=4 parallel.pp=2 pipeline.weight_versions=stash "
             "optimizer.max_grad_norm=null "
            "model.tied_embeddings=false"),
            "model.moe.num_experts=null, not 4",
        ),
        (
            ("model.moe.num_experts=4 model.moe.aux_loss_scope=microbatch parallel.pp=2 "
            "pipeline.schedule=chimera_backward_halving"),
            "expected sequence or step",
        ),
        (
            ("model.moe.num_experts=4 model.moe.capacity_factor=1 model.moe.drop_policy=score "
             "parallel.pp=2 "
            "pipeline.schedule=seq1f1b pipeline.sequence_slices=2"),
            "model.moe.drop_policy=score needs all tokens of a sequence: expected position",
        ),
        ("checkpoint.upcycle=true", "has no effect without model.moe.num_experts: expected false"),
        ("model.moe.num_experts=4 checkpoint.upcycle=true",
         "has no effect without checkpoint.load"),
        (
            ("model.moe.num_experts=4 model.moe.shared_ffn_hidden=8 checkpoint.upcycle=true "
             "checkpoint.load=x"),
            "a dense model has no weights for model.moe.shared_ffn_hidden=8: expected null",
        ),
        (
            "model.moe.num_experts=4 checkpoint.export_every=2 model.vocab_size=257",
            "checkpoint.export_every=2: model.norm = layernorm cannot be expressed by Hugging",
        ),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        resolve(parse(given.split()).config, 2, 257)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
