"""Weights and configurations to and from transformers' classes, bit by bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.rope import RopeConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.model.gpt.hf.config import class_of, config_from_hf, config_to_hf, row_of
from megapipe.model.gpt.hf.weights import entries, from_hf, to_hf
from tests.parity.reference import init_random, logits, random_batch
from tests.unit.model.transformers_models import (
    FAMILIES,
    MIXTURES,
    in_double,
    load_exactly,
    model_of,
)

GPT2 = ModelConfig(layers=2, hidden=12, heads=3, vocab_size=31, max_positions=10).resolved(
    vocab_size=0, sequence_length=0
)
LLAMA = ModelConfig(
    layers=2,
    hidden=12,
    heads=4,
    kv_heads=2,
    ffn_hidden=20,
    vocab_size=31,
    max_positions=10,
    norm="rmsnorm",
    norm_eps=1e-6,
    positions="rotary",
    rope=RopeConfig(base=500000.0),
    activation="swiglu",
    bias=False,
    tied_embeddings=False,
).resolved(vocab_size=0, sequence_length=0)
MODELS = {
    "gpt2": GPT2,
    "gpt2_untied": GPT2.model_copy(update={"tied_embeddings": False, "activation": "gelu"}),
    "gpt2_dropout": GPT2.model_copy(update={"dropout": 0.1, "ffn_hidden": 17, "init_std": 0.01}),
    "llama": LLAMA,
    "llama_biases": LLAMA.model_copy(update={"bias": True}),
    "llama_tied": LLAMA.model_copy(update={"tied_embeddings": True}),
    "llama_mqa_wide_heads": LLAMA.model_copy(update={"kv_heads": 1, "head_dim": 8}),
    **{name: model_of(name).model_copy(update={"dtype": "fp32"}) for name in FAMILIES | MIXTURES},
}

MIXTRAL = MODELS["mixtral"]


def with_experts(model: ModelConfig = MIXTRAL, **changes: Any) -> ModelConfig:
    return model.model_copy(update={"moe": model.moe.model_copy(update=changes)})


def of_dots1(**changes: Any) -> ModelConfig:
    return with_experts(MODELS["dots1"], **changes)


def dots1(**changes: Any) -> Dots1Config:
    keys = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    return Dots1Config(**(keys | changes))


def hf_model(model: ModelConfig) -> Any:
    return class_of(model)(config_to_hf(model))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_weights_survive_both_ways(name: str) -> None:
    model = MODELS[name]
    params = init_random(model, seed=3, dtype=torch.float32)
    state = to_hf(params, model)
    assert_same(from_hf(state, model), params)
    assert all(tensor.is_contiguous() for tensor in state.values())

    hf = hf_model(model)
    load_exactly(hf, state)
    assert_same(from_hf(hf.state_dict(), model), params)

    original = {
        name.replace("embed_out", "lm_head"): torch.randn_like(tensor)
        for name, tensor in hf_model(model).state_dict().items()
    }
    if model.tied_embeddings:
        embedding = f"{row_of(model).modules['embedding.word']}.weight"
        original["lm_head.weight"] = original[embedding]
    assert_same(to_hf(from_hf(original, model), model), original)


@pytest.mark.parametrize("name", MODELS)
def test_configs_survive_both_ways(name: str) -> None:
    assert config_from_hf(config_to_hf(MODELS[name])) == MODELS[name]


def test_saved_files_hold_the_weights(tmp_path: Any) -> None:
    params = init_random(GPT2, seed=3, dtype=torch.float32)
    hf = hf_model(GPT2)
    load_exactly(hf, to_hf(params, GPT2))
    hf.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    model = config_from_hf(again.config)
    assert model == GPT2
    assert_same(from_hf(again.state_dict(), model), params)


def test_rows_of_qkv_go_by_group() -> None:
    # heads 4, kv_heads 2, head_dim 3: 24 rows of which each is filled with its own number
    rows = torch.arange(24.0)
    params = init_random(LLAMA, seed=3, dtype=torch.float32)
    params["layers.1.attention.qkv.weight"] = rows[:, None].expand(24, 12)
    state = to_hf(params, LLAMA)
    attention = "model.layers.1.self_attn"
    q, k, v = (state[f"{attention}.{part}_proj.weight"][:, 0].tolist() for part in "qkv")
    assert q == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]  # heads 0 and 1, heads 2 and 3
    assert k == [6, 7, 8, 18, 19, 20]
    assert v == [9, 10, 11, 21, 22, 23]


def test_rows_of_gpt2_qkv_and_transposed_weights() -> None:
    # heads 3, head_dim 4: 36 rows
    params = init_random(GPT2, seed=3, dtype=torch.float32)
    params["layers.0.attention.qkv.bias"] = torch.arange(36.0)
    state = to_hf(params, GPT2)
    q, k, v = state["transformer.h.0.attn.c_attn.bias"].view(3, 12).tolist()
    assert q == [0, 1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 27]
    assert k == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]
    assert v == [8, 9, 10, 11, 20, 21, 22, 23, 32, 33, 34, 35]
    up = params["layers.0.mlp.up.weight"]
    assert torch.equal(state["transformer.h.0.mlp.c_fc.weight"], up.T)


def test_gate_is_the_first_half_of_up() -> None:
    params = init_random(LLAMA, seed=3, dtype=torch.float32)
    state = to_hf(params, LLAMA)
    up = params["layers.0.mlp.up.weight"]
    assert torch.equal(state["model.layers.0.mlp.gate_proj.weight"], up[0])
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], up[1])


@pytest.mark.parametrize(
    ("name", "gate", "up"),
    [
        ("mixtral", "2.block_sparse_moe.experts.1.w1", "2.block_sparse_moe.experts.1.w3"),
        ("qwen3_moe", "2.mlp.experts.1.gate_proj", "2.mlp.experts.1.up_proj"),
    ],
)
def test_files_have_tensors_for_each_expert(name: str, gate: str, up: str) -> None:
    """State dicts have them joined. Either spelling is read, layer by layer."""
    model = MODELS[name]
    params = init_random(model, seed=3, dtype=torch.float32)
    state, spelled = to_hf(params, model), {}
    for entry in entries(row_of(model), model):
        parts = entry.transform.split(params[entry.name], model)
        spelled |= dict(zip(entry.hf_names, parts, strict=True))
    found = torch.cat([spelled[f"model.layers.{part}.weight"] for part in (gate, up)])
    assert torch.equal(state["model.layers.2.mlp.experts.gate_up_proj"][1], found)
    assert_same(from_hf(spelled, model), params)
    of_layer = ".layers.2."
    mixed = {n: t for n, t in spelled.items() if of_layer not in n}
    mixed |= {n: t for n, t in state.items() if of_layer in n}
    assert len(mixed) not in (len(spelled), len(state))
    assert_same(from_hf(mixed, model), params)


def test_layers_without_experts_are_listed_as_a_class_does() -> None:
    def keys(**changes: Any) -> tuple[int, list[int]]:
        base = MODELS["qwen3_moe_every"]
        config = config_to_hf(
            base.model_copy(
                update={
                    "moe": MoEConfig(num_experts=4, expert_ffn_hidden=20, topk_groups=1, **changes)
                }
            )
        )
        again = config_from_hf(config).moe
        moe = MoEConfig(num_experts=4, **changes)
        assert all(again.has_experts(i) == moe.has_experts(i) for i in range(6))
        return config.decoder_sparse_step, config.mlp_only_layers

    assert keys() == (1, [])
    assert keys(first_dense_layers=2) == (1, [0, 1])
    assert keys(first_dense_layers=2, layer_freq=2) == (2, [1])
    assert keys(first_dense_layers=1, layer_freq=2) == (1, [0, 1, 3, 5])
    assert keys(dense_layers=[0, 4]) == (1, [0, 4])


def test_old_files_load() -> None:
    params = init_random(GPT2, seed=3, dtype=torch.float32)
    state = {n.removeprefix("transformer."): t for n, t in to_hf(params, GPT2).items()}
    del state["lm_head.weight"]
    state["h.0.attn.bias"] = torch.ones(1, 1, 10, 10)
    state["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    assert_same(from_hf(state, GPT2), params)

    params = init_random(LLAMA, seed=3, dtype=torch.float32)
    neox = model_of("pythia")
    params = init_random(neox, seed=3, dtype=torch.float32)
    state = to_hf(params, neox) | {"gpt_neox.layers.0.attention.masked_bias": torch.ones(1)}
    state["embed_out.weight"] = state.pop("lm_head.weight")
    assert_same(from_hf(state, neox), params)

    params = init_random(LLAMA, seed=3, dtype=torch.float32)
    state = to_hf(params, LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert_same(from_hf(state, LLAMA), params)


@pytest.mark.parametrize(
    ("model", "spoil", "message"),
    [
        (LLAMA, {"model.layers.1.mlp.up_proj.weight": None}, "1.mlp.up_proj.weight is missing"),
        (LLAMA, {"lm_head.weight": None}, r"lm_head.weight is missing.*\(31, 12\)"),
        (
            LLAMA,
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(12, 12)},
            r"k_proj.weight has shape \(12, 12\); the model needs \(6, 12\)",
        ),
        (LLAMA, {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "layers.2.* model.layers"),
        (LLAMA, {"model.layers.0.mlp.up_proj.bias": torch.ones(20)}, "bias is not part"),
        (
            MIXTRAL,
            {"model.layers.1.mlp.experts.down_proj": None},
            "1.block_sparse_moe.experts.0.w2.weight is missing",
        ),
        (GPT2, {"lm_head.weight": torch.ones(31, 12)}, "model.tied_embeddings=false"),
    ],
)
def test_a_state_of_another_model_is_refused(
    model: ModelConfig, spoil: dict[str, Tensor | None], message: str
) -> None:
    state = to_hf(init_random(model, seed=3, dtype=torch.float32), model) | spoil
    with pytest.raises(CheckpointError, match=message) as caught:
        from_hf({name: t for name, t in state.items() if t is not None}, model)
    assert "\n" not in str(caught.value)


def test_the_balance_of_experts_is_that_of_the_class() -> None:
    for config in (MixtralConfig(router_aux_loss_coef=0.02), Qwen3MoeConfig()):
        model = config_from_hf(config)
        assert model.moe.aux_loss_coeff == config.router_aux_loss_coef
        assert config_to_hf(model).router_aux_loss_coef == config.router_aux_loss_coef
    assert config_from_hf(config_to_hf(of_dots1(aux_loss_coeff=0.3))).moe.aux_loss_coeff == 0, (
        "it has none"
    )


def test_params_of_another_model_are_refused() -> None:
    params = init_random(LLAMA, seed=3)
    with pytest.raises(CheckpointError, match=r"layers.1.attention.out.weight is not part"):
        to_hf(params, LLAMA.model_copy(update={"layers": 1}))
    with pytest.raises(CheckpointError, match=r"layers.2.attention_norm.weight is missing"):
        to_hf(params, LLAMA.model_copy(update={"layers": 3}))
    with pytest.raises(CheckpointError, match=r"qkv.weight has shape \(24, 12\)"):
        to_hf(params, LLAMA.model_copy(update={"kv_heads": 4}))


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (OPTConfig(), "model_type 'opt' is not supported; supported are gpt2, llama, .* and "),
        (GPT2Config(activation_function="relu"), "activation_function 'relu'.*gelu_new"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (GPT2Config(scale_attn_weights=False), "scale_attn_weights = False.*must be True"),
        (GPT2Config(add_cross_attention=True), "add_cross_attention"),
        (GPT2Config(attn_pdrop=0.0), "attn_pdrop = 0.0.*must be 0.1, as resid_pdrop"),
        (GPT2Config(n_embd=10, n_head=4), "heads x model.head_dim = 8.*needs 10"),
        (GPT2Config(initializer_range=0.0), "gpt2 config gives model.init_std = 0.0"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'gelu'.*supported are silu"),
        (LlamaConfig(attention_bias=True), "mlp_bias = False.*must be True, as attention_bias"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout = 0.1"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_parameters with rope_type 'dynamic'.* llama; supported are default, linear, ",
        ),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "truncate": False,
                }
            ),
            "rope_parameters with truncate = False",
        ),
        (Qwen2Config(use_sliding_window=True), "use_sliding_window = True.* for qwen2"),
        (Qwen3Config(attention_bias=True), "attention_bias = True.* for qwen3"),
        (
            BloomConfig(apply_residual_connection_post_layernorm=True),
            "apply_residual_connection_post_layernorm = True",
        ),
        (BloomConfig(hidden_dropout=0.1), "hidden_dropout = 0.1"),
        (GPTNeoXConfig(hidden_act="relu"), "hidden_act 'relu'.* for gpt_neox"),
        (
            Gemma2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            "layer_types .* every n-th layer, sliding",
        ),
        (
            Gemma3TextConfig(
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                }
            ),
            "rope_parameters of sliding_attention with rope_type 'linear'",
        ),
        (MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise = 0.1.* for mixtral"),
        (
            MixtralConfig(num_experts_per_tok=9),
            "num_local_experts = 8, num_experts_per_tok = 9, .*: model.moe.top_k=9 is more than",
        ),
        (
            MixtralConfig(num_local_experts=1),
            "num_local_experts = 1, .*model.moe.num_experts = 1: ",
        ),
        (
            Qwen3MoeConfig(num_experts_per_tok=1, norm_topk_prob=True),
            (
                "num_experts_per_tok = 1, .*norm_topk_prob = True, .*expected "
                "model.moe.norm_topk_prob=f"
            ),
        ),
        (dots1(n_shared_experts=None), "n_shared_experts = None: expected 1 or more"),
        (dots1(n_group=3), "n_group = 3, .*model.moe.num_experts=8 is not divisible by .*groups=3"),
        (dots1(topk_group=0), "topk_group = 0 cannot be expressed: model.moe.topk_groups = 0"),
        (dots1(n_routed_experts=None), "n_routed_experts = None, .*it has no experts"),
        (dots1(attention_bias=True), "attention_bias = True.* for dots1"),
        (Qwen3MoeConfig(decoder_sparse_step=0), "decoder_sparse_step = 0: expected 1 or more"),
        (
            Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[0, 1]),
            "num_experts = 128, .* leave no MoE layer in model.layers=2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configs_are_refused(hf_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_hf(hf_config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (GPT2, {"norm": "rmsnorm"}, "model.norm = rmsnorm.*gpt2 class.*needs layernorm"),
        (GPT2, {"activation": "swiglu"}, "model.activation = swiglu.*needs gelu or gelu_tanh"),
        (GPT2, {"bias": False}, "model.bias = False"),
        (GPT2, {"kv_heads": 1}, "model.kv_heads = 1.*needs 3"),
        (GPT2, {"head_dim": 8}, "heads x model.head_dim = 24.*needs 12"),
        (GPT2, {"vocab_size": None}, "model.vocab_size is not set"),
        (LLAMA, {"norm": "layernorm"}, "model.norm = layernorm.*llama class.*needs rmsnorm"),
        (LLAMA, {"activation": "gelu"}, "model.activation = gelu.*needs swiglu"),
        (LLAMA, {"hidden": 14, "bias": True}, "hidden % model.heads = 2"),
        (LLAMA, {"kv_heads": 3}, "heads % model.kv_heads = 1"),
        (GPT2, {"positions": "alibi"}, "positions = alibi.*gpt2 class .the nearest."),
        (
            model_of("gemma2"),
            {"embedding_scale": 3.0},
            r"embedding_scale = 3.0.*gemma2 class.*needs 4.0 \(sqrt\(hidden\)\)",
        ),
        (model_of("gemma2"), {"attention_scale": 0.3}, "attention_scale = 0.3.*needs 1 / sqrt"),
        (model_of("gemma3"), {"rope": RopeConfig(base=500.0)}, "qk_norm = True.*gemma2.*nearest"),
        (MIXTRAL, {"bias": True}, "model.bias = True .*mixtral class.*nearest.; it needs False"),
        (
            MIXTRAL,
            {"moe": MoEConfig(num_experts=4, expert_ffn_hidden=9)},
            "moe.topk_groups = None.*mixtral",
        ),
        (
            with_experts(capacity_factor=1.0),
            {},
            "model.moe.capacity_factor = 1.0 .*mixtral.*it needs None",
        ),
        (
            with_experts(shared_ffn_hidden=8),
            {},
            "model.moe.shared_ffn_hidden = 8 .*mixtral.*it needs None",
        ),
        (
            with_experts(first_dense_layers=1),
            {},
            "model.moe.first_dense_layers = 1 .*mixtral.*it needs 0",
        ),
        (
            with_experts(norm_topk_prob=False),
            {},
            "model.moe.norm_topk_prob = False .*mixtral.*needs True",
        ),
        (
            with_experts(score_function="sigmoid"),
            {},
            "model.moe.score_function = sigmoid .*it needs softmax",
        ),
        (
            with_experts(bias_update_rate=0.1),
            {},
            "model.moe.bias_update_rate = 0.1 .*mixtral.*it needs None",
        ),
        (
            with_experts(num_experts=[4, 8, 8]),
            {},
            r"moe.num_experts = \[4, 8, 8\] .*mixtral.* one number",
        ),
        (
            of_dots1(num_experts=[8, 4]),
            {},
            r"model.moe.num_experts = \[8, 4\] .*dots1.* one number",
        ),
        (
            of_dots1(bias_update_rate=None),
            {},
            "model.moe.bias_update_rate = None .*dots1.*it needs a number",
        ),
        (
            of_dots1(shared_ffn_hidden=20),
            {},
            "model.moe.shared_ffn_hidden = 20 .*dots1.*a multiple of .* 12",
        ),
        (of_dots1(layer_freq=2), {}, "model.moe.layer_freq = 2 .*dots1.*it needs 1"),
    ],
)
def test_models_without_a_class_are_refused(
    model: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_to_hf(model.model_copy(update=changes))
    with pytest.raises(ConfigError, match=message):
        to_hf({}, model.model_copy(update=changes))


def test_a_class_may_be_named() -> None:
    assert config_to_hf(LLAMA, "mistral").model_type == "mistral"
    gemma = model_of("gemma3")
    rope = gemma.rope.model_copy(update={"local_base": None})
    model = gemma.model_copy(update={"rope": rope})
    with pytest.raises(ConfigError, match=r"rope.local_base = None.*gemma3_text class; it needs"):
        config_to_hf(model, "gemma3_text")


def test_default_configs_of_transformers() -> None:
    gpt2 = config_from_hf(GPT2Config())
    assert (gpt2.layers, gpt2.hidden, gpt2.heads, gpt2.ffn_hidden) == (12, 768, 12, 3072)
    assert (gpt2.vocab_size, gpt2.max_positions, gpt2.dropout) == (50257, 1024, 0.1)
    assert (gpt2.activation, gpt2.tied_embeddings, gpt2.bias) == ("gelu_tanh", True, True)
    llama = config_from_hf(LlamaConfig(num_key_value_heads=8))
    assert (llama.layers, llama.hidden, llama.heads, llama.kv_heads) == (32, 4096, 32, 8)
    assert (llama.head_dim, llama.ffn_hidden, llama.norm_eps) == (128, 11008, 1e-6)
    assert (llama.tied_embeddings, llama.bias, llama.rope.base) == (False, False, 10000.0)
    bloom = config_from_hf(BloomConfig())  # which has no length
    assert (bloom.layers, bloom.hidden, bloom.heads, bloom.ffn_hidden) == (2, 64, 8, 256)
    assert (bloom.max_positions, bloom.positions) == (2048, "alibi")
    assert config_from_hf(BloomConfig(seq_length=99)).max_positions == 99


@pytest.mark.parametrize(
    ("hf_config", "key"),
    [
        (LlamaConfig(), "rms_norm_eps"),
        (LlamaConfig(), "hidden_act"),
        (LlamaConfig(), "mlp_bias"),
        (LlamaConfig(), "attention_dropout"),
        (Gemma2Config(), "layer_types"),
    ],
)
def test_a_missing_key_is_named(hf_config: Any, key: str) -> None:
    keys = hf_config.to_dict()
    config_from_hf(SimpleNamespace(**keys))
    del keys[key]
    with pytest.raises(ConfigError, match=rf"config has no {key}, which is needed"):
        config_from_hf(SimpleNamespace(**keys))


def test_gelu_fast_is_the_tanh_form_with_rounded_constants() -> None:
    """In fp64 logits of up to 3.4 differ by 3.1e-12 from transformers'; with exact GELU by 9e-4."""
    model = model_of("pythia").model_copy(update={"activation": "gelu_tanh"})
    params = init_random(model, seed=7)
    tokens = random_batch(model, b=3, s=17, seed=8)[0]
    config = config_to_hf(model, attn_implementation="eager")
    assert config.hidden_act == "gelu_new"
    config.hidden_act = "gelu_fast"
    assert config_from_hf(config) == model.model_copy(update={"dtype": "fp32"})
    with in_double(model):
        hf = class_of(model)(config).double()
        load_exactly(hf, to_hf(params, model))
        expected = hf(input_ids=tokens).logits
    exact = model.model_copy(update={"activation": "gelu"})
    assert (logits(params, model, tokens) - expected).abs().max() <= 1e-11
    assert (logits(params, exact, tokens) - expected).abs().max() >= 1e-4
