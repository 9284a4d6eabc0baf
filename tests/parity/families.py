"""GPT as a family, for tests that need no layout."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from megapipe.config.model import ModelConfig
from megapipe.layers.specs import local_numel_total
from megapipe.model.gpt.model_spec import GPTSpec
from megapipe.model.interface import RunShape
from megapipe.model.partition import StageSpec


def gpt(model: ModelConfig, *, tp: int = 1) -> GPTSpec:
    """Return the family of a resolved model."""
    return GPTSpec(model, RunShape(model.max_positions or 1, microbatch=1, tp=tp))


def token_flops(model: ModelConfig, length: int) -> int:
    """Return the FLOPs of training on one token of sequences of `length`."""
    return GPTSpec(model, RunShape(length, microbatch=1)).token_flops()


def kernel_flops(model: ModelConfig, length: int) -> int:
    """Return the FLOPs of the kernels that train on one token of sequences of `length`: only scores
    that a causal mask leaves, with two products forward and five backward."""
    assert model.head_dim is not None
    queries = model.layers * model.heads * model.head_dim
    return token_flops(model, length) - queries * (12 * length - 7 * (length + 1))


def shapes_of(model: ModelConfig, stage: StageSpec | None = None) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of the parameters of a stage, by default of the model."""
    return gpt(model).shapes(stage)


def count(model: ModelConfig, stage: StageSpec | None = None) -> int:
    """Count the parameters of a stage, by default of the model."""
    return gpt(model).num_parameters(stage)


def count_held(model: ModelConfig, stages: Iterable[StageSpec], tp: int) -> int:
    """Count the parameters that one tensor-parallel rank keeps for `stages`."""
    return local_numel_total(chain.from_iterable(map(gpt(model).parameters, stages)), tp)
