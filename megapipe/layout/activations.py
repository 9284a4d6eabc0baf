"""Maps the keys ``activations.*`` to what the blocks of each stage save for the backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megapipe.config.activations import ActivationsConfig
from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.model.interface import UniformRecompute
from megapipe.model.partition import StageSpec


def block_policies(
    config: ActivationsConfig, stages: Sequence[StageSpec], recomputed: Collection[int] = ()
) -> tuple[tuple[BlockSpan, ...], ...]:
    """Divide the blocks of each stage, in order, into spans of consecutive blocks with one policy.

    The stages in `recomputed` are recomputed as a whole, as their policy or the schedule demands.
    Their blocks save all activations, so that no block is recomputed twice. Raises
    :class:`ConfigError` if a list in `config` has another length than `stages`, or for a negative
    ``num_blocks``.
    """
    policies = _for_each("policy", config.policy, len(stages))
    blocks = _for_each("num_blocks", config.num_blocks, len(stages))
    spans = []
    for i, (policy, most, stage) in enumerate(zip(policies, blocks, stages, strict=True)):
        layers = len(stage.layers)
        if most is not None and most < 0:
            raise ConfigError(f"activations.num_blocks={config.num_blocks}: expected a number >= 0")
        affected = layers if most is None else min(most, layers)
        if i in recomputed:
            affected = 0
        whole = config.blocks_per_recompute if policy == "full" else max(affected, 1)
        treated = BlockPolicy(*_modules(config, policy), config.keep_attention)
        counts = [min(whole, affected - start) for start in range(0, affected, whole)]
        others = BlockPolicy(saves_attention=config.keep_attention)
        rest = [BlockSpan(layers - affected, others)] if affected < layers else []
        spans.append((*(BlockSpan(count, treated) for count in counts), *rest))
    return tuple(spans)


def uniform_recompute(config: ActivationsConfig) -> UniformRecompute | None:
    """Return how every layer is recomputed; None if that depends on the layer's stage."""
    if config.num_blocks is not None or not isinstance(config.policy, str):
        return None
    policy = BlockPolicy(*_modules(config, config.policy), config.keep_attention)
    return UniformRecompute(policy, config.blocks_per_recompute, config.policy == "stage")


def recomputed_stages(config: ActivationsConfig, stages: int) -> frozenset[int]:
    """Return the stages that ``activations.policy=stage`` recomputes as a whole."""
    policies = _for_each("policy", config.policy, stages)
    return frozenset(stage for stage, policy in enumerate(policies) if policy == "stage")


def _modules(config: ActivationsConfig, policy: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return (recomputed modules, modules with offloaded activations) under `policy`."""
    if policy == "full":
        return frozenset({"block"}), frozenset({"block"} if "norm" in config.offload else ())
    recomputed = config.modules if policy == "selective" else ()
    return frozenset(recomputed), frozenset(config.offload)


def _for_each(key: str, given: Any, stages: int) -> list[Any]:
    """Return one value per stage. `given`: a list of these values, or one value for all stages."""
    if not isinstance(given, list):
        return [given] * stages
    if len(given) != stages:
        raise ConfigError(
            f"activations.{key} has {len(given)} items for {stages} virtual stages: expected "
            "one for each, or a single value"
        )
    return given
