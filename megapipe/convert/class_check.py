"""Check that a Hugging Face class and megapipe's model compute the same from one configuration.

A configuration keeps any key, whether its class uses it or not, so reading the configuration back
proves nothing. Here the class and megapipe both build the configuration's model, at toy width and
with the same random weights, and their logits are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from megapipe.cli import flatten
from megapipe.command_line import phase
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.specs import bias_name
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.model.gpt.hf.config import config_from_hf
from megapipe.model.gpt.hf.table import TABLE
from megapipe.model.gpt.hf.weights import TensorMapping, entries
from megapipe.model.gpt.parameters import known
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import owned_parameters
from megapipe.text import one_line

MOST_TOKENS = 32
MOST_IDS = 61
WINDOW = 7
"""Sliding window of the toy model: shorter than the text, so that it has an effect."""
HEAD_DIM = 8
TOLERANCE = 1e-3
"""Largest accepted difference, in standard deviations of the logits; classes compute norms, softmax
and rotary angles in fp32."""
ATTEMPTS = 3
"""Maximum number of random initializations for an MoE model: between nearly equal router scores,
rounding decides, and then logits differ."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_class(config: Any, model: ModelConfig | None = None) -> None:
    """Compare megapipe's model with the class that ``AutoModelForCausalLM`` takes for `config`.

    Args:
        config: a class's configuration that :func:`~megapipe.model.gpt.hf.config.config_from_hf`
            reads.
        model: the resolved model for which `config` was written; default: the model that `config`
            describes.

    Raises:
        ConfigError: the logits differ. If a single key makes the difference, the error names it.
    """
    with phase("comparing the model with its class of transformers"), _aside():
        _compare(config, config_from_hf(config) if model is None else model)


def _compare(config: Any, model: ModelConfig) -> None:
    toy = at_toy_width(config, model)
    found = difference(toy, narrowed(model))
    if found is None:
        return
    name = TABLE[config.model_type].model_class
    described = config_from_hf(toy)
    if difference(toy, described) is None:
        stored, wanted = (flatten(Config(model=each)) for each in (described, narrowed(model)))
        other = sorted(k for k in wanted if stored[k] != wanted[k] and k != "model.dtype")
        raise ConfigError(
            f"the config of transformers' {name} describes another model ({found}); it differs in "
            f"{', '.join(other)}"
        )
    # try keys first that megapipe ignores, so that only the class interprets them
    left_out = sorted(each_left_out(toy), key=lambda each: config_from_hf(each[1]) != described)
    for path, rest in left_out:
        if difference(rest, config_from_hf(rest)) is None:
            value = reduce(getitem, path, config.to_dict())
            raise ConfigError(
                f"{'.'.join(path)} = {value}: transformers' {name} computes another model than "
                f"megapipe ({found}); without this key they agree"
            )
    raise ConfigError(f"transformers' {name} computes another model than megapipe ({found})")


def at_toy_width(config: Any, model: ModelConfig) -> Any:
    """Return `config` with the toy sizes of :func:`narrowed`; other keys keep their values."""
    keys, canonical, narrow = config.to_dict(), type(config).attribute_map, narrowed(model)
    for part in TABLE[config.model_type].parts:
        before = part.write(model)
        for key, value in part.write(narrow).items():
            if value != before[key]:
                keys[canonical.get(key, key)] = value
    return type(config).from_dict(keys | dict.fromkeys(SPECIAL_TOKENS))


def narrowed(model: ModelConfig) -> ModelConfig:
    """Return the model with few heads and experts, narrow layers, a short sliding window and a
    small vocabulary. If one size divides another, it still does."""
    kv_heads, head_dim = known(model.kv_heads), known(model.head_dim)
    few = 2 if kv_heads % 2 == 0 else min(kv_heads, 3)
    if kv_heads & (kv_heads - 1):  # ALiBi has two rules for slopes
        few = 3
    heads = _fewer(model.heads // kv_heads) * few
    turned = {width: width * model.rope.percent for width in range(HEAD_DIM, head_dim, 2)}
    width = next((w for w, n in turned.items() if n >= HEAD_DIM / 2 and n % 2 == 0), head_dim)
    ratio = heads * width / (model.heads * head_dim)
    hidden = max(1, round(model.hidden * ratio / heads)) * heads

    def narrow(size: int | None) -> int | None:
        return size and max(1, round(size * hidden / model.hidden))

    moe, ffn = model.moe, narrow(model.moe.expert_ffn_hidden)
    if isinstance(moe.num_experts, int):
        enough = max(2, -(-2 * moe.top_k // (moe.topk_groups or moe.num_groups))) * moe.num_groups
        shared = moe.shared_ffn_hidden and moe.shared_ffn_hidden // known(
            moe.expert_ffn_hidden
        ) * known(ffn)
        changes = {
            "num_experts": min(moe.num_experts, enough),
            "expert_ffn_hidden": ffn,
            "shared_ffn_hidden": shared,
        }
        moe = moe.model_copy(update=changes)
    return model.model_copy(
        update={
            "heads": heads,
            "kv_heads": few,
            "head_dim": width,
            "hidden": hidden,
            "ffn_hidden": narrow(model.ffn_hidden),
            "embedding_scale": model.embedding_scale
            and model.embedding_scale * (hidden / model.hidden) ** 0.5,
            "moe": moe,
            "vocab_size": min(known(model.vocab_size), MOST_IDS),
            "sliding_window": model.sliding_window and min(model.sliding_window, WINDOW),
        }
    )


def _fewer(heads: int) -> int:
    """Return a small number of query heads per key head. It is a power of two only if `heads` is a
    power of two."""
    return min(heads, 3 if heads & (heads - 1) else 4)


def each_left_out(config: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield, for each key that differs from the class's default, its path and the configuration
    without it; keys in dictionaries come first. Keys that determine sizes are not left out."""
    keys, default = config.to_dict(), type(config)().to_dict()
    shapes = _shapes(config)
    inner = [
        (name, key) for name, value in keys.items() if isinstance(value, dict) for key in value
    ]
    for path in (*inner, *((name,) for name in keys)):
        left, usual = keys, default
        for name in path[:-1]:
            left, usual = left[name], usual.get(name) or {}
        if path == ("model_type",) or left[path[-1]] == usual.get(path[-1]):
            continue
        rest = {name: of for name, of in left.items() if name != path[-1]}
        try:
            without = type(config).from_dict(rest if len(path) == 1 else {**keys, path[0]: rest})
            same = _shapes(without) == shapes
        except Exception:  # whatever the class raises for its values
            continue
        if same:
            yield path, without


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the model that a configuration describes, by name."""
    model = config_from_hf(config)
    return {entry.name: entry.shape for entry in entries(TABLE[config.model_type], model)}


def difference(config: Any, model: ModelConfig) -> str | None:
    """Describe how the class's logits differ from the model's; None if only rounding differs."""
    model = model.model_copy(update={"dtype": "fp64"})
    found = None
    for seed in range(1 if model.moe.num_experts is None else ATTEMPTS):
        rng = torch.Generator().manual_seed(seed)
        parts = list(entries(TABLE[config.model_type], model))
        tensors = {entry.name: _random(entry, model, rng) for entry in parts}
        shape = (2, min(MOST_TOKENS, known(model.max_positions)))
        tokens = torch.randint(known(model.vocab_size), shape, generator=rng)
        try:
            theirs = _logits_of_class(config, model, parts, tensors, tokens)
        except Exception as error:  # whatever the class raises for its values
            return one_line(error)
        ours = _logits(model, tensors, tokens)
        apart = ((theirs - ours).abs().max() / ours.std()).item()
        if apart <= TOLERANCE:
            return None
        found = f"logits differ by up to {apart:.2g} of their standard deviation"
    return found


def _random(entry: TensorMapping, model: ModelConfig, rng: torch.Generator) -> Tensor:
    """Return random weights that let every part of a model matter, even the norms' epsilon."""
    values = torch.randn(entry.shape, generator=rng, dtype=torch.float64)
    if entry.name.startswith("embedding."):
        return values * (10 * model.norm_eps) ** 0.5
    if len(entry.shape) > 1:
        return values / entry.shape[-1] ** 0.5
    is_factor = (
        "norm" in entry.name and entry.name.endswith("weight") and not model.zero_centered_norm
    )
    return values / 4 + is_factor


def _logits_of_class(
    config: Any,
    model: ModelConfig,
    parts: list[TensorMapping],
    tensors: Mapping[str, Tensor],
    tokens: Tensor,
) -> Tensor:
    """Compute the class's logits, [b, s, V], after loading the class from a folder."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory(prefix="megapipe-class-") as folder:
        config.save_pretrained(folder)
        found = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for entry in parts
            for name, tensor in zip(
                entry.hf_names, entry.transform.split(tensors[entry.name], model), strict=True
            )
        }
        save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded, info = load(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ConfigError(f"{kind.replace('_', ' ')}: {', '.join(map(str, info[kind]))}")
    with torch.no_grad():
        logits: Tensor = loaded.eval()(input_ids=tokens, use_cache=False).logits
    return logits.double()


@contextmanager
def _aside() -> Iterator[None]:
    """Silence transformers' messages and progress bars, and restore the random state at the end."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _logits(model: ModelConfig, tensors: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Compute the logits, [b, s, V], of megapipe's model."""
    stage = StageSpec(embedding=True, layers=range(model.layers), head=True)
    module = GPTStage(model, stage, Sharding(Axis.alone(), False, torch.float64))
    for owned in owned_parameters(module):
        spec = spec_of(owned.parameter)
        values = torch.zeros(spec.sizes, dtype=torch.float64)  # with padding
        values[tuple(map(slice, spec.shape))] = tensors[spec.name]
        owned.replace(Parameter(values, requires_grad=False))
    for layer in module.modules():
        if isinstance(layer, RoutedExperts) and layer.bias is not None:
            layer.bias.copy_(tensors[bias_name(layer.layer).removeprefix("model/")])
    module.train(False)
    mb = MicroBatch(index=0, step=0, seed=0, tokens=tokens)
    with torch.no_grad():
        logits = module.logits(None, mb).transpose(0, 1)
    return logits[..., : model.vocab_size]
