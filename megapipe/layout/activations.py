"""From ``activations.*`` to what the blocks of each stage keep for their backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megapipe.config.activations import ActivationsConfig
from megapipe.errors import ConfigError
from megapipe.layers.policy import BlockPolicy, BlockSpan
from megapipe.model.interface import UniformRecompute
from megapipe.model.partition import StageSpec


def block_policies(
    config: ActivationsConfig, stages: Sequence[StageSpec], again: Collection[int] = ()
) -> tuple[tuple[BlockSpan, ...], ...]:
    """The spans of each stage's blocks, in order.

    Stages in `again` are recomputed as a whole, by their policy or by the schedule; their blocks
    keep all activations, so that no block is run a third time. Raises :class:`ConfigError` for a
    list that is not one item per stage, or a negative number.
    """
    policies = _for_each("policy", config.policy, len(stages))
    blocks = _for_each("blocks", config.blocks, len(stages))
    spans = []
    for i, (policy, most, stage) in enumerate(zip(policies, blocks, stages, strict=True)):
        layers = len(stage.layers)
        if most is not None and most < 0:
            raise ConfigError(f"activations.blocks={config.blocks}: expected no negative number")
        affected = layers if most is None else min(most, layers)
        if i in again:
            affected = 0
        whole = config.span if policy == "full" else max(affected, 1)
        treated = BlockPolicy(*_modules(config, policy), config.keep_attention)
        counts = [min(whole, affected - start) for start in range(0, affected, whole)]
        others = BlockPolicy(keeps_attention=config.keep_attention)
        rest = [BlockSpan(layers - affected, others)] if affected < layers else []
        spans.append((*(BlockSpan(count, treated) for count in counts), *rest))
    return tuple(spans)


def uniform_recompute(config: ActivationsConfig) -> UniformRecompute | None:
    """The policy that all layers share; None if it depends on a layer's stage."""
    if config.blocks is not None or not isinstance(config.policy, str):
        return None
    policy = BlockPolicy(*_modules(config, config.policy), config.keep_attention)
    return UniformRecompute(policy, config.span, config.policy == "stage")


def recomputed_stages(config: ActivationsConfig, stages: int) -> frozenset[int]:
    """The stages that are recomputed as a whole."""
    policies = _for_each("policy", config.policy, stages)
    return frozenset(stage for stage, policy in enumerate(policies) if policy == "stage")


def _modules(config: ActivationsConfig, policy: str) -> tuple[frozenset[str], frozenset[str]]:
    """Modules that `policy` runs again, and modules whose activations are offloaded with it."""
    if policy == "full":
        return frozenset({"block"}), frozenset({"block"} if "norm" in config.offload else ())
    again = config.modules if policy == "selective" else ()
    return frozenset(again), frozenset(config.offload)


def _for_each(key: str, given: Any, stages: int) -> list[Any]:
    """`given`, a value for all stages or a list with one for each, as a list."""
    if not isinstance(given, list):
        return [given] * stages
    if len(given) != stages:
        raise ConfigError(
            f"activations.{key} has {len(given)} items for {stages} virtual stages: expected "
            "one for each, or a single value"
        )
    return given
