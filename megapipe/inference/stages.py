"""The stages of a model for inference, and the loading of this rank's weights."""

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
from megapipe.layout.model_spec import make_model_spec
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
"""Map from a configuration key in an error message about sizes to the command-line option that
replaces it."""


def family_for(model: ModelConfig, lora: Lora | None, *, context: int, tp: int) -> ModelSpec:
    """Return the model family for a context of `context` tokens, over `tp` ranks, with the adapters
    `lora` if any. Raises :class:`ConfigError`."""
    try:
        family = make_model_spec(model, RunShape(context, microbatch=1, tp=tp, lora=lora))
        if model.moe.capacity_factor is not None:
            raise ConfigError(
                f"model.moe.capacity_factor={model.moe.capacity_factor:g}: the capacity of an "
                "expert depends on a text's length, so generation and evaluation do not "
                "support it: expected null"
            )
        if tp > 1 and "tp" not in family.supports:
            raise ConfigError(f"parallel.tp={tp}: {family.name} has no support for it; expected 1")
        family.check()
    except ConfigError as error:
        raise _in_options(error) from None
    return family


def stages_of(family: ModelSpec, pp: int) -> tuple[StageSpec, ...]:
    """Split the model into `pp` stages; minimize the slowest stage's time. Raises ConfigError."""
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
    """Load every parameter from its region of the weights. Both uses of a tied embedding share one
    tensor. Also load the routers' expert biases, which are still on the host.

    Raises :class:`~megapipe.errors.CheckpointError` if a weight is missing or damaged.
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
