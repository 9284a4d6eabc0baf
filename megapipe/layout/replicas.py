"""The ZeRO policy of data-parallel replicas that follows from a configuration."""

from megapipe.config import OptimizerConfig
from megapipe.schedule.data_parallel import ReplicaPolicy


def zero_stage(optimizer: OptimizerConfig, dp: int) -> int:
    """The ZeRO stage in force: at most 1 where the shard group has one member."""
    return optimizer.zero if (optimizer.shard_size or dp) > 1 else min(optimizer.zero, 1)


def replica_policy(optimizer: OptimizerConfig, dp: int, *, loss_chunk: int) -> ReplicaPolicy:
    """When `dp` replicas reduce gradients and gather weights; `loss_chunk` is the layout's."""
    return ReplicaPolicy(zero_stage(optimizer, dp), optimizer.prefetch, loss_chunk > 0)
