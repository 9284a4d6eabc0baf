"""The stages of a model for inference, and the weights of this rank's."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.checkpoint.regions import whole
from megapipe.checkpoint.stateful import TensorReader
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.layers.lora_specs import Lora
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.specs import bias_name
from megapipe.layers.parameter import spec_of
from megapipe.layout.family import make_model_spec
from megapipe.model.interface import ModelSpec, RunShape, StageModule
from megapipe.model.partition import StageSpec, balanced, parse_layout
from megapipe.optim.buffers import owned_parameters
from megapipe.schedule.placement import loop
from megapipe.train.checkpoint_io import read_region

OPTIONS = {
    "parallel.tp": "--tp",
    "pipeline stages (parallel.pp x pipeline.chunks)": "pipeline stages (--pp)",
    "train.sequence_length": "--context",
}
"""Keys of a run in messages about sizes, and the options that stand for them here."""


def family_for(model: ModelConfig, lora: Lora | None, *, context: int, tp: int) -> ModelSpec:
    """The family of a model of `context` tokens, with adapters or without, over `tp` ranks; raises
    :class:`ConfigError`."""
    try:
        family = make_model_spec(model, RunShape(context, microbatch=1, tp=tp, lora=lora))
        if model.moe.capacity is not None:
            raise ConfigError(
                f"model.moe.capacity={model.moe.capacity:g}: texts of other lengths would have "
                "other places, and generation and evaluation have no support for it; expected null"
            )
        if tp > 1 and "tp" not in family.supports:
            raise ConfigError(f"parallel.tp={tp}: {family.name} has no support for it; expected 1")
        family.check()
    except ConfigError as error:
        raise _in_options(error) from None
    return family


def stages_of(family: ModelSpec, pp: int) -> tuple[StageSpec, ...]:
    """A stage for each of `pp` ranks, the slowest as fast as can be; raises ConfigError."""
    forward = [Fraction(cost) for cost in family.unit_costs(None)]
    try:
        text = balanced(forward, loop(pp), ends=family.has_embedding_and_head)
    except ConfigError as error:
        raise _in_options(error) from None
    return parse_layout(text, family.layers, ends=family.has_embedding_and_head)


def _in_options(error: ConfigError) -> ConfigError:
    text = str(error)
    for key, option in OPTIONS.items():
        text = text.replace(f"{key}=", f"{option} ").replace(key, option)
    return ConfigError(text)


def fill(module: StageModule, weights: TensorReader, device: torch.device) -> None:
    """Give every parameter its region of the weights; two uses of a tied embedding share one. And
    routers, which are on the host yet, the biases of their experts.

    Raises :class:`~megapipe.errors.CheckpointError` for what is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for owned in owned_parameters(module):
        spec = spec_of(owned.parameter)
        if spec.name not in tensors:
            values = torch.zeros(spec.sizes, dtype=owned.parameter.dtype, device=device)
            read_region(weights, "model", spec, values)
            tensors[spec.name] = values
        owned.replace(Parameter(tensors[spec.name], requires_grad=False))
    for layer in module.modules():
        if isinstance(layer, RoutedExperts) and layer.bias is not None:
            weights.read_into(layer.bias, bias_name(layer.layer), whole(tuple(layer.bias.shape)))
