"""The ZeRO stage in force, and the policy of data-parallel replicas."""

from megapipe.config.config import OptimizerConfig
from megapipe.model.interface import ModelSpec
from megapipe.schedule.data_parallel import ReplicaPolicy


def max_replicas(model: ModelSpec, dp_cp: int, of_experts: int) -> int:
    """Return the number of processes that hold equal weights: `dp_cp` for dense weights,
    `of_experts` for experts; the larger number if the model has experts."""
    return max(dp_cp, of_experts) if model.experts() else dp_cp


def effective_zero_stage(optimizer: OptimizerConfig, copies: int) -> int:
    """Return the ZeRO stage in force. It is at most 1 if a shard group has one process, which then
    holds all gradients and weights anyway.

    `copies`: number of processes that hold equal weights (:func:`max_replicas`).
    """
    return optimizer.zero if (optimizer.shard_group_size or copies) > 1 else min(optimizer.zero, 1)


def replica_policy(optimizer: OptimizerConfig, copies: int, *, loss_chunk: int) -> ReplicaPolicy:
    """Make the policy for `copies` data-parallel replicas. `loss_chunk`: maximum number of tokens
    whose logits exist at a time; 0: all, without a chunked loss."""
    return ReplicaPolicy(
        effective_zero_stage(optimizer, copies), optimizer.weight_prefetch, loss_chunk > 0
    )
