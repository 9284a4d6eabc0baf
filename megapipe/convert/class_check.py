"""Whether a class of Hugging Face's computes what our model of its configuration does.

A configuration keeps any key, used by its class or not, so reading the configuration back proves
nothing. Here both sides build the model that it describes, at toy width and with the same random
weights, and their logits are compared.
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

from megapipe.command_line import phase
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
from megapipe.words import one_line

MOST_TOKENS = 32
MOST_IDS = 61
WINDOW = 7
"""A sliding window must be shorter than the text, or no token would notice it."""
HEAD_DIM = 8
TOLERANCE = 1e-3
"""Largest difference, in standard deviations of the logits: classes compute norms, softmax and
rotary angles in fp32."""
ATTEMPTS = 3
"""Draws of weights: where two experts' scores are nearly equal, rounding decides between them."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_class(config: Any, model: ModelConfig | None = None) -> None:
    """Compare the class that ``AutoModelForCausalLM`` takes for `config` with our model.

    Args:
        config: a class' configuration that
            :func:`~megapipe.model.gpt.hf.config.config_from_hf` reads.
        model: the resolved model that `config` was written of; default: the one that it describes.

    Raises:
        ConfigError: their logits differ. The key that makes the difference is named, if it is one.
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
        fields = ModelConfig.model_fields.keys() - {"dtype"}
        other = sorted(f for f in fields if getattr(described, f) != getattr(narrowed(model), f))
        raise ConfigError(
            f"the config of transformers' {name} describes another model ({found}), by "
            f"model.{', model.'.join(other)}"
        )
    # first keys that describe nothing to megapipe, so that the class alone makes something of them
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
    """The configuration of the `narrowed` model, but for its other keys, which are as they were."""
    keys, canonical, narrow = config.to_dict(), type(config).attribute_map, narrowed(model)
    for part in TABLE[config.model_type].parts:
        before = part.write(model)
        for key, value in part.write(narrow).items():
            if value != before[key]:
                keys[canonical.get(key, key)] = value
    return type(config).from_dict(keys | dict.fromkeys(SPECIAL_TOKENS))


def narrowed(model: ModelConfig) -> ModelConfig:
    """The model with few heads and experts, narrow layers, a short window and a small vocabulary.
    Sizes that divide each other still do."""
    kv_heads, head_dim = known(model.kv_heads), known(model.head_dim)
    few = 2 if kv_heads % 2 == 0 else min(kv_heads, 3)
    if kv_heads & (kv_heads - 1):  # ALiBi has two rules for slopes
        few = 3
    heads = _fewer(model.heads // kv_heads) * few
    turned = {width: width * model.rotary_share for width in range(HEAD_DIM, head_dim, 2)}
    width = next((w for w, n in turned.items() if n >= HEAD_DIM / 2 and n % 2 == 0), head_dim)
    ratio = heads * width / (model.heads * head_dim)
    hidden = max(1, round(model.hidden * ratio / heads)) * heads

    def narrow(size: int | None) -> int | None:
        return size and max(1, round(size * hidden / model.hidden))

    moe, ffn = model.moe, narrow(model.moe.ffn)
    if isinstance(moe.experts, int):
        enough = max(2, -(-2 * moe.top_k // (moe.group_top_k or moe.groups))) * moe.groups
        shared = moe.shared and moe.shared // known(moe.ffn) * known(ffn)
        changes = {"experts": min(moe.experts, enough), "ffn": ffn, "shared": shared}
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
            "window": model.window and min(model.window, WINDOW),
        }
    )


def _fewer(heads: int) -> int:
    """Return a small number of query heads for a key head: a power of two where `heads` is one."""
    return min(heads, 3 if heads & (heads - 1) else 4)


def each_left_out(config: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each key that has not the class' default, those in dictionaries first, and
    the configuration without it. Keys that are sizes stay."""
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
        except Exception:  # whatever the class makes of its values
            continue
        if same:
            yield path, without


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a configuration's model, by name."""
    model = config_from_hf(config)
    return {entry.name: entry.shape for entry in entries(TABLE[config.model_type], model)}


def difference(config: Any, model: ModelConfig) -> str | None:
    """Describe how the class' logits differ from the model's; None if only by rounding."""
    model = model.model_copy(update={"dtype": "fp64"})
    found = None
    for seed in range(1 if model.moe.experts is None else ATTEMPTS):
        rng = torch.Generator().manual_seed(seed)
        parts = list(entries(TABLE[config.model_type], model))
        tensors = {entry.name: _random(entry, model, rng) for entry in parts}
        shape = (2, min(MOST_TOKENS, known(model.max_positions)))
        tokens = torch.randint(known(model.vocab_size), shape, generator=rng)
        try:
            theirs = _logits_of_class(config, model, parts, tensors, tokens)
        except Exception as error:  # whatever the class makes of its values
            return one_line(error)
        ours = _logits(model, tensors, tokens)
        apart = ((theirs - ours).abs().max() / ours.std()).item()
        if apart <= TOLERANCE:
            return None
        found = f"logits differ by up to {apart:.2g} of their standard deviation"
    return found


def _random(entry: TensorMapping, model: ModelConfig, rng: torch.Generator) -> Tensor:
    """Weights with which every part of a model has a say: also what is added to variances."""
    values = torch.randn(entry.shape, generator=rng, dtype=torch.float64)
    if entry.name.startswith("embedding."):
        return values * (10 * model.norm_eps) ** 0.5
    if len(entry.shape) > 1:
        return values / entry.shape[-1] ** 0.5
    is_factor = "norm" in entry.name and entry.name.endswith("weight") and not model.norm_offset
    return values / 4 + is_factor


def _logits_of_class(
    config: Any,
    model: ModelConfig,
    parts: list[TensorMapping],
    tensors: Mapping[str, Tensor],
    tokens: Tensor,
) -> Tensor:
    """Compute logits, [b, s, V], as a program does that loads the class from a folder."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory(prefix="megapipe-class-") as folder:
        config.save_pretrained(folder)
        found = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for entry in parts
            for name, tensor in zip(
                entry.hf_names, entry.way.split(tensors[entry.name], model), strict=True
            )
        }
        save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded, told = load(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            raise ConfigError(f"{kind.replace('_', ' ')}: {', '.join(map(str, told[kind]))}")
    with torch.no_grad():
        logits: Tensor = loaded.eval()(input_ids=tokens, use_cache=False).logits
    return logits.double()


@contextmanager
def _aside() -> Iterator[None]:
    """Let transformers load without lines and bars, and without taking random numbers."""
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
    """Compute logits, [b, s, V], by our model."""
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
