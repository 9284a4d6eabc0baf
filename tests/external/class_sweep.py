"""Every causal language model of the installed transformers, at toy size, in a pipeline of two;
and those with attention by megapipe's kernels, with documents and with keys and values kept.

``python -m tests.external.class_sweep`` prints a line for each model type; ``--write`` puts the
table into docs/classes.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megapipe import Pipeline, transformers_layers
from megapipe.errors import ConfigError
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.hf import attention, experts
from megapipe.model.hf.calls import LayerCalls
from megapipe.model.hf.features import why_not
from megapipe.model.hf.outline import outline_of
from megapipe.ops.documents import Documents
from tests.parity.class_models import FAMILIES, MOE, SIZES, AllInDouble

PAGE = Path(__file__).parents[2] / "docs" / "classes.md"
BEGIN, END = "<!-- model types -->\n", "<!-- end of model types -->\n"
VOCAB = 101
MOST_PARAMETERS = 6_000_000
"""Parameters of a class above which the settings have not made it small."""
TOLERANCE = 1e-12
"""Largest distance of a gradient from the untouched model's, relative to its norm."""
RANDOM = {"phimoe": "its router draws random numbers"}
"""Types that compute something else at each call, even without dropout."""
LENGTH, CUT = 12, 7
"""Tokens of a sample, and how many of them come before its second document or slice."""
HEADS = 4
MORE: Mapping[str, Any] = {
    **MOE,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "moe_k": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "sliding_window": 6,
    "attention_window_size": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": HEADS,
    "n_inner": 48,
    "n_positions": 64,
    "ffn_hidden_size": 48,
    "d_model": 32,
    "n_heads": HEADS,
    "n_layers": 4,
    "num_heads": HEADS,
    "max_seq_len": 64,
    "rotary_dim": 4,
    "original_max_position_embeddings": 64,
    "query_pre_attn_scalar": 8,
    "attn_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_rank": 2,
    "conv_kernel": 4,
    "expand": 2,
    "lru_width": 32,
    "conv_dim": 32,
    "block_dim": 32,
    "block_ff_dim": 48,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "mlp_only_layers": [],
    "num_hidden_groups": 1,
}
"""Small values of settings that some classes have beside those of every family."""
ALL_HEADS = ("axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
TYPES: Mapping[str, Mapping[str, Any]] = {
    **FAMILIES,
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    **{name: {"num_key_value_heads": HEADS} for name in ALL_HEADS},
    **{name: {"num_key_value_heads": HEADS} for name in ("minicpm3", "mistral4", "youtu")},
    **{
        name: {"layer_types": ["linear_attention", "full_attention"] * 2}
        for name in ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
    },
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "deepseek_v2": {"num_key_value_heads": HEADS, "topk_method": "greedy"},
    "falcon": {"num_kv_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_expand": 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_expand": 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        "num_key_value_heads": HEADS,
        "linear_attn_config": {
            "short_conv_kernel_size": 4,
            "head_dim": 8,
            "num_heads": HEADS,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*E-", "mamba_hidden_act": "silu"},
}
"""Settings of single types."""


class Verdict(NamedTuple):
    """Result of a model type."""

    name: str
    kind: str
    """equal, refused (by megapipe), unbuilt (transformers cannot make it at toy size) or wrong."""
    reason: str = ""
    attended: bool = False
    """Whether it was equal with documents, and with keys and values kept, too."""


def toy_config(name: str) -> Any:
    """Make a small configuration, without dropout."""
    cls = CONFIG_MAPPING[name]
    fields = {f for base in cls.__mro__ for f in getattr(base, "__annotations__", {})}
    renamed = getattr(cls, "attribute_map", {})
    given = {**SIZES, **MORE, "vocab_size": VOCAB}
    config = cls(
        **{
            **{key: value for key, value in given.items() if key in fields - renamed.keys()},
            **TYPES.get(name, {}),
        }
    )
    for key, value in vars(config).items():
        if ("dropout" in key or "pdrop" in key or key.endswith("_drop")) and value:
            setattr(config, key, 0.0)
    return config


def toy_model(name: str) -> Any:
    """Make a small model in fp64 with random values in every tensor."""
    experts.register()
    config = toy_config(name)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"its toy has {parameters / 1e6:,.0f} million parameters")
    torch.manual_seed(0)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float64,
        experts_implementation=experts.NAME,
        attn_implementation="eager" if capped else None,  # SDPA left soft caps out in 5.9
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter), alpha=0.1)
    return model.double().train()


def check(name: str) -> Verdict:
    """Compare a type in a pipeline with the untouched model: every gradient of one step. A class
    that computes softmaxes or routers in fp32, where layouts differ, computes them in fp64 too."""
    verdict = _check(name)
    if verdict.kind != "wrong":
        return verdict
    with AllInDouble():
        return _check(name)


def _check(name: str) -> Verdict:
    if name in RANDOM:
        return Verdict(name, "unbuilt", RANDOM[name])
    try:
        model = toy_model(name)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(5, VOCAB, (4, LENGTH + 1), generator=generator)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        wanted = copy.deepcopy(model)
        for part, own in zip(tokens.split(2), labels.split(2), strict=True):
            logits = wanted(input_ids=part, use_cache=False).logits
            (functional.cross_entropy(logits.flatten(0, 1), own.flatten()) / 2).backward()
    except Exception as error:  # whatever a class or its configuration raises
        return Verdict(name, "unbuilt", _reason(error))
    model, why = with_own_attention(model)
    try:
        layers = transformers_layers(model)
    except ConfigError as error:
        return Verdict(name, "refused", str(error).partition(": ")[2])
    except Exception as error:  # of a class on the meta device
        return Verdict(name, "refused", f"on the meta device {_reason(error)}")
    Pipeline(layers, schedule="1f1b", microbatches=2, ranks=2).step((tokens, labels))
    for (path, a), (_, b) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        if (distance := _distance(a.grad, b.grad)) > TOLERANCE:
            return Verdict(name, "wrong", f"the gradient of {path} is {distance:.1g} off")
    if why:
        return Verdict(name, "equal", why)
    wanted.load_state_dict(model.state_dict())
    for what, own, whole in (
        ("documents", *by_documents(layers, wanted, rows)),
        ("kept keys and values", *by_slices(layers, wanted, rows)),
    ):
        if (distance := _distance(own, whole)) > TOLERANCE:
            return Verdict(name, "wrong", f"logits with {what} are {distance:.1g} off")
    return Verdict(name, "equal", attended=True)


def with_own_attention(model: Any) -> tuple[Any, str]:
    """Return a model with megapipe's attention and ""; or the model itself and why it keeps its
    own."""
    attention.register()
    try:
        own = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config),
            dtype=torch.float64,
            experts_implementation=experts.NAME,
            attn_implementation=attention.NAME,
        )
        own.load_state_dict(model.state_dict())
        own = own.double().train()
        outline = outline_of(copy.deepcopy(own).to("meta"))
        why = why_not("document_mask", outline, LayerCalls(own, outline), LENGTH)
    except Exception as error:  # of a class whose masks cannot be patterns
        return model, _reason(error)
    return (own if any(outline.attention) else model), why


def by_documents(
    layers: Sequence[Any], wanted: Any, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of samples of two documents; and those of each document alone."""
    ids = (torch.arange(LENGTH) >= CUT).long().expand(len(rows), LENGTH)
    mb = MicroBatch(0, 0, 0, documents=Documents(ids, torch.device("cpu")))
    alone = [
        wanted(input_ids=rows[:, a:b], position_ids=torch.arange(a, b)[None], use_cache=False)
        for a, b in ((0, CUT), (CUT, LENGTH))
    ]
    whole = torch.cat([each.logits for each in alone], 1)
    return _through(layers, rows[:, :LENGTH], mb, None), whole


def by_slices(
    layers: Sequence[Any], wanted: Any, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of samples read in two slices with a KV cache; and those of whole ones."""
    cache = KVCache(LENGTH)
    parts = [
        _through(layers, rows[:, a:b], MicroBatch(0, 0, 0, start=a), cache)
        for a, b in ((0, CUT), (CUT, LENGTH))
    ]
    return torch.cat(parts, 1), wanted(input_ids=rows[:, :LENGTH], use_cache=False).logits


def _through(
    layers: Sequence[Any], x: torch.Tensor, mb: MicroBatch, cache: KVCache | None
) -> torch.Tensor:
    for layer in layers:
        x = layer(x, mb, cache)
    return x


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return how far two gradients are apart, relative to the second; None is zero."""
    if a is None or b is None:
        one = b if a is None else a
        return 0.0 if one is None or not one.any() else float("inf")
    size = float(b.norm())
    return float((a - b).norm()) / size if size else float(a.norm())


def _reason(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 110 else f"{text[:107]}..."


def sweep(names: Iterable[str]) -> Iterator[Verdict]:
    """Yield the verdict of each model type."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            yield check(name)


def table(verdicts: Iterable[Verdict]) -> str:
    """Return the verdicts as text for docs/classes.md."""
    by_kind: dict[str, list[Verdict]] = {}
    for each in verdicts:
        by_kind.setdefault(each.kind, []).append(each)
    equal = [each.name for each in by_kind.get("equal", [])]
    attended = [each.name for each in by_kind.get("equal", []) if each.attended]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    lines = [
        f"With {versions} these {len(equal)} types are equal:",
        "",
        "```text",
        *textwrap.wrap(" ".join(equal), 110),
        "```",
        "",
        f"In {len(attended)} of them megapipe's kernels compute attention in every layer. Their",
        "logits are equal with documents, and with keys and values kept, too:",
        "",
        "```text",
        *textwrap.wrap(" ".join(attended), 110),
        "```",
        "",
        "| not equal | because |",
        "|---|---|",
        *(f"| {each.name} | {each.reason} |" for each in by_kind.get("refused", [])),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("types", nargs="*", help="model types (all)")
    options.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    verdicts, start = [], time.perf_counter()
    for each in sweep(given.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        taken, start = time.perf_counter() - start, time.perf_counter()
        print(f"{each.name:24} {each.kind:8} {taken:5.1f} s  {each.reason}", flush=True)
        verdicts.append(each)
    print(", ".join(f"{count} {kind}" for kind, count in Counter(v.kind for v in verdicts).items()))
    if given.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}{table(verdicts)}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
