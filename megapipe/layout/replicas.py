"""The ZeRO policy of data-parallel replicas that follows from a configuration."""

from megapipe.config.config import OptimizerConfig
from megapipe.model.interface import ModelSpec
from megapipe.schedule.data_parallel import ReplicaPolicy


def max_replicas(model: ModelSpec, dp_cp: int, of_experts: int) -> int:
    """The most processes that compute with the same weights: `dp_cp`, or so many of experts."""
    return max(dp_cp, of_experts) if model.experts() else dp_cp


def effective_zero_stage(optimizer: OptimizerConfig, copies: int) -> int:
    """The ZeRO stage in force: at most 1 where the shard group has one member.

    `copies` are the processes that compute with the same weights, where most do.
    """
    return optimizer.zero if (optimizer.shard_size or copies) > 1 else min(optimizer.zero, 1)


def replica_policy(optimizer: OptimizerConfig, copies: int, *, loss_chunk: int) -> ReplicaPolicy:
    """When `copies` reduce gradients and gather weights; `loss_chunk` is the layout's."""
    return ReplicaPolicy(
        effective_zero_stage(optimizer, copies), optimizer.prefetch, loss_chunk > 0
    )
