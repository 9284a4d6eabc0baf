"""Exports and imports are compared with what transformers' classes compute."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from megapipe.convert import HuggingFaceFolder, check_export, class_check, export
from megapipe.convert.class_check import at_toy_width, check_class, narrowed
from megapipe.errors import ConfigError
from megapipe.layout.model_spec import make_model_spec
from megapipe.model.gpt.hf.config import config_from_hf, config_to_hf, row_of
from megapipe.model.gpt.hf.rope import PARTIAL_ROPE, ROPE
from megapipe.model.gpt.hf.table import TABLE, HFClass
from megapipe.model.interface import RunShape
from tests.parity.converted import write_checkpoint
from tests.parity.pairs import Choice, Pairs
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import LINEAR, LLAMA3, YARN, YARN_FACTOR, model_of

ROPE_SETTINGS: dict[str, RopeConfig] = {
    "plain": RopeConfig(),
    "another base": RopeConfig(base=300.0),
    "llama_linear": RopeConfig(**LINEAR),
    "llama3.1": RopeConfig(**LLAMA3),
    "llama_yarn": RopeConfig(**YARN),
    "llama_yarn_factor": RopeConfig(**YARN_FACTOR),
}
VALUES: dict[str, tuple[Any, ...]] = {
    "layers": (3, 5),
    "hidden": (16, 64),
    "heads": (4, 8),
    "kv_heads": (4, 2, 1, 8),
    "head_dim": (4, 8, 10),
    "ffn_hidden": (40, 64),
    "vocab_size": (37, 80),
    "max_positions": (19, 64),
    "norm_eps": (1e-5, 1e-2),
    "parallel_residual": (False, True),
    "logit_softcap": (None, 3.0),
    "attention_scale": (None, 12**-0.5),
    "attention_softcap": (None, 2.0),
    "sliding_window": (None, 5, 12),
    "full_attention_every": (None, 2, 3),
    "activation": ("gelu", "gelu_tanh", "swiglu", "geglu_tanh"),
    "bias": (False, True),
    "tied_embeddings": (False, True),
    "dropout": (0.0, 0.1),
    "init_std": (0.02, 0.1),
    "rope": tuple(ROPE_SETTINGS),
}
"""Values of each field that a part of a row has; one of `rope` sets several fields at a time."""
ROPE_VALUES: dict[str, tuple[Any, ...]] = {
    "local_base": (None, 50.0),
    "percent": (1.0, 0.5, 0.25),
}
"""Values of the fields of `rope` that only some classes have."""
MOE_VALUES: dict[str, tuple[Any, ...]] = {
    "num_experts": (8, 4),
    "top_k": (2, 3, 1),
    "expert_ffn_hidden": (40, 12, 64),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (1.0, 2.5),
    "num_groups": (1, 4),
    "topk_groups": (1, 2),
    "first_dense_layers": (0, 1),
    "layer_freq": (1, 2),
    "dense_layers": ((), (2,)),
    "shared_ffn_hidden": (None, 24, 40, 64, 80, 128),
    "bias_update_rate": (None, 0.0),
    "score_function": ("softmax", "sigmoid"),
}
PLAIN = {
    **{of: model_of(of) for of in ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2")},
    **{of: model_of(of) for of in ("bloom", "mixtral", "qwen3_moe", "dots1")},
    "gemma3_text": model_of("gemma3"),
    "gpt_neox": model_of("pythia"),
}
OF_HIDDEN: dict[str, tuple[str, Callable[[int], float]]] = {
    "bloom": ("ffn_hidden", lambda hidden: 4 * hidden),
    "gemma2": ("embedding_scale", lambda hidden: hidden**0.5),
    "gemma3_text": ("embedding_scale", lambda hidden: hidden**0.5),
}
"""Fields that the class has no key for."""


def dimensions(row: HFClass) -> dict[str, tuple[Any, ...]]:
    """Return values of the fields that a row's class has keys for, those of its model first."""
    claimed = dict.fromkeys(name for part in row.parts for name in part.fields)
    of_hidden, _ = OF_HIDDEN.get(row.model_type, ("", None))
    found = {name: VALUES[name] for name in claimed if name not in ("moe", of_hidden)}
    if "rope" in claimed:
        found |= {f"rope.{name}": values for name, values in ROPE_VALUES.items()}
    if "moe" in claimed:
        found |= {f"moe.{name}": values for name, values in MOE_VALUES.items()}
    plain = plain_choice(row, found)

    def fits(name: str, value: Any) -> bool:
        model = changed(row, {**plain, name: value})
        return all(name != misfit.what for misfit in row.misfits(model))

    return {
        name: (plain[name], *(v for v in values if v != plain[name] and fits(name, v)))
        for name, values in found.items()
    }


def plain_choice(row: HFClass, names: Iterable[str]) -> Choice:
    model = PLAIN[row.model_type]
    fields = model.model_dump() | {f"moe.{n}": v for n, v in model.moe.model_dump().items()}
    fields |= {f"rope.{n}": v for n, v in model.rope.model_dump().items()}
    fields |= {"rope": "plain", "moe.dense_layers": tuple(model.moe.dense_layers)}
    return {name: fields[name] for name in names}


def within(section: str, choice: Choice) -> dict[str, Any]:
    """Return the values of a choice for a section of the model, by the section's fields."""
    before = f"{section}."
    return {k.removeprefix(before): v for k, v in choice.items() if k.startswith(before)}


def changed(row: HFClass, choice: Choice) -> ModelConfig:
    """Return the row's plain model with the values of a choice."""
    plain = PLAIN[row.model_type]
    fields = {name: value for name, value in choice.items() if "." not in name}
    if "rope" in fields:
        rope = ROPE_SETTINGS[fields["rope"]]
        fields["rope"] = rope.model_copy(update=within("rope", choice))
    moe = within("moe", choice)
    if moe:
        moe["dense_layers"] = list(moe["dense_layers"])
        fields["moe"] = plain.moe.model_copy(update=moe)
    if row.model_type in OF_HIDDEN:
        name, of = OF_HIDDEN[row.model_type]
        fields[name] = of(fields["hidden"])
    return plain.model_copy(update=fields).resolved(vocab_size=None, sequence_length=0)


def model_with(row: HFClass, choice: Choice) -> ModelConfig:
    """Return the row's model with a choice. Raises ConfigError where package or row refuse it."""
    model = changed(row, choice)
    row_of(model, row.model_type)
    assert model.vocab_size is not None
    assert model.max_positions is not None
    make_model_spec(model, RunShape(model.max_positions, microbatch=1, tp=1)).check()
    return model


@pytest.mark.parametrize("model_type", TABLE)
def test_every_pair_of_values_of_a_rows_keys_is_computed_alike(model_type: str) -> None:
    row = TABLE[model_type]
    dims = dimensions(row)

    def blame(choice: Choice) -> frozenset[str]:
        try:
            model_with(row, choice)
        except ConfigError as error:
            named = {name for name in dims if re.search(rf"\b{name.split('.')[-1]}\b", str(error))}
            return frozenset(named or dims)
        return frozenset()

    pairs = Pairs(dims, blame, {}, {})
    choices, _ = pairs.covering(random.Random(0))
    for choice in choices:
        model = model_with(row, choice)
        check_class(config_to_hf(model, model_type), model)


@pytest.mark.parametrize("model_type", TABLE)
def test_a_folder_of_the_usual_size_is_compared(model_type: str) -> None:
    config = getattr(transformers, TABLE[model_type].config_class)()
    usual = {
        "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    }
    for name, value in usual.get(model_type, {}).items():
        setattr(config, name, value)
    check_class(config)
    toy = config_from_hf(at_toy_width(config, config_from_hf(config)))
    assert toy.layers == config_from_hf(config).layers
    assert toy.hidden <= 128
    assert (toy.sliding_window or 0) < 10


def test_a_little_more_in_the_norms_is_another_model() -> None:
    model = PLAIN["llama"]
    other = model.model_copy(update={"norm_eps": 1.1 * model.norm_eps})
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM describes .* model.norm_eps$"):
        check_class(config_to_hf(other), model)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, HFClass]:
    """Return the table; what a test changes in it is undone."""
    for name, row in TABLE.items():
        monkeypatch.setitem(TABLE, name, row)
    return TABLE


def use_the_share(table: dict[str, HFClass], model_type: str) -> None:
    """Change the table as if the class rotated a share of a head's values."""
    row = table[model_type]
    partial = PARTIAL_ROPE._replace(write_old=lambda model: {})
    parts = tuple(partial if part is ROPE else part for part in row.parts)
    table[model_type] = replace(row, parts=parts)


def test_a_config_that_describes_another_model_is_refused(table: dict[str, HFClass]) -> None:
    row = table["gpt_neox"]
    old = PARTIAL_ROPE._replace(write_old=lambda model: {"rope_scaling": {"rope_type": "default"}})
    parts = tuple(old if part is PARTIAL_ROPE else part for part in row.parts)
    table["gpt_neox"] = replace(row, parts=parts)
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM describes .* model.rope.percent$"):
        check_export(PLAIN["gpt_neox"].model_copy(update={"rope": RopeConfig(percent=0.5)}))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_a_key_that_the_class_keeps_and_ignores_is_named(
    model_type: str, table: dict[str, HFClass], tmp_path: Path
) -> None:
    use_the_share(table, model_type)
    rope = RopeConfig(base=500.0, percent=0.5)
    model = PLAIN[model_type].model_copy(update={"head_dim": 8, "rope": rope, "hidden": 32})
    model = model.model_copy(update={"embedding_scale": model.embedding_scale and 32**0.5})
    told = r"rope_parameters.partial_rotary_factor = 0.5: transformers' \w+ computes another model"
    with pytest.raises(ConfigError, match=told):
        check_class(config_to_hf(model, model_type), model)

    with pytest.raises(ConfigError, match=told):
        check_export(model)
    checkpoint = write_checkpoint(tmp_path / "run", model, init_random(model, seed=5))
    with pytest.raises(ConfigError, match=told):
        export(checkpoint, tmp_path / "hf", model_type=model_type, tokenizer="none")
    assert not (tmp_path / "hf").exists()

    config_to_hf(model, model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'config.json'}: {told}"):
        HuggingFaceFolder.open(tmp_path)


def test_a_key_of_the_class_that_the_table_does_not_know_is_named(
    table: dict[str, HFClass],
) -> None:
    table["gpt2"] = replace(table["gpt2"], required={})
    config = config_to_hf(PLAIN["gpt2"])
    check_class(config)
    config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(ConfigError, match=r"^scale_attn_by_inverse_layer_idx = True: tr"):
        check_class(config)


def test_a_key_that_means_nothing_to_megapipe_is_named_before_others() -> None:
    """Without its window the class agrees too, as texts are shorter than the default."""
    config = config_to_hf(PLAIN["mistral"])
    config.sliding_window = 24
    check_class(config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with pytest.raises(ConfigError, match=r"^layer_types = \['full_attention', .*: tr"):
        check_class(config)


def test_a_key_is_named_with_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line does not name the value at toy width, which is 7."""
    monkeypatch.setattr(
        class_check, "difference", lambda config, _: "far" if config.sliding_window == 7 else None
    )
    config = config_to_hf(PLAIN["mistral"])
    config.sliding_window = 24
    with pytest.raises(ConfigError, match=r"^sliding_window = 24: .* \(far\)"):
        check_class(config)


def test_a_class_that_fails_is_told_with_its_error(table: dict[str, HFClass]) -> None:
    use_the_share(table, "llama")
    rope = RopeConfig(base=500.0, percent=0.5, **LINEAR)
    changes = {"head_dim": 8, "rope": rope, "hidden": 32}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0.5: .*must match the size"):
        check_export(PLAIN["llama"].model_copy(update=changes))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral"])
def test_a_share_of_rotated_values_is_of_classes_that_use_it(model_type: str) -> None:
    rope = RopeConfig(base=500.0, percent=0.5)
    model = PLAIN[model_type].model_copy(update={"rope": rope})
    with pytest.raises(ConfigError, match=f"rope.percent = 0.5 cannot be .* {model_type} class"):
        config_to_hf(model, model_type)
    config = config_to_hf(PLAIN[model_type], model_type)
    config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match=f"_factor = 0.5 are not supported for {model_type}: its"):
        config_from_hf(config)


def test_caps_that_gemma3_ignores_are_refused() -> None:
    config = config_to_hf(PLAIN["gemma3_text"])
    config.attn_logit_softcapping = 50.0
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping = 50.0 is not supported"):
        config_from_hf(config)
    model = PLAIN["gemma3_text"].model_copy(update={"attention_softcap": 50.0})
    with pytest.raises(ConfigError, match=r"attention_softcap = 50.0 cannot be expressed"):
        config_to_hf(model)


def test_groups_of_one_expert_are_of_no_class() -> None:
    plain = PLAIN["dots1"]
    moe = plain.moe.model_copy(
        update={"num_experts": 4, "top_k": 2, "num_groups": 4, "topk_groups": 2}
    )
    with pytest.raises(ConfigError, match=r"num_experts = 4 .* twice as many as model.moe.num_gro"):
        config_to_hf(plain.model_copy(update={"moe": moe}))


def test_tokens_that_choose_among_few_groups_have_experts_to_choose_from() -> None:
    groups = {"n_routed_experts": 256, "n_group": 8, "topk_group": 1, "num_experts_per_tok": 8}
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 1}
    check_class(transformers.Dots1Config(**groups, **layers))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "few"), [(128, 1, 4), (48, 1, 3), (128, 8, 8), (9, 3, 9), (2, 2, 2)]
)
def test_a_model_of_many_heads_becomes_one_of_few(heads: int, kv_heads: int, few: int) -> None:
    model = PLAIN["llama"].model_copy(
        update={"heads": heads, "kv_heads": kv_heads, "head_dim": 8, "hidden": 8 * heads}
    )
    assert narrowed(model).heads == few


def test_random_numbers_and_settings_of_libraries_stay(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = torch.get_rng_state(), torch.get_default_dtype(), logging.get_verbosity()
    check_class(transformers.LlamaConfig())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), logging.get_verbosity()) == before[1:]
    assert capfd.readouterr() == ("", "")
