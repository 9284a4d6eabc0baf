"""How data-parallel replicas share what they all need, as far as a configuration decides it."""

from megapipe.config import OptimizerConfig
from megapipe.schedule.data_parallel import ReplicaPolicy


def zero_stage(optimizer: OptimizerConfig, dp: int) -> int:
    """The ZeRO stage in force: 1 at most where a group of one has nothing to share out."""
    return optimizer.zero if (optimizer.shard_size or dp) > 1 else min(optimizer.zero, 1)


def replica_policy(optimizer: OptimizerConfig, dp: int, *, loss_chunk: int) -> ReplicaPolicy:
    """When `dp` replicas reduce gradients and gather weights; `loss_chunk` is the layout's."""
    return ReplicaPolicy(zero_stage(optimizer, dp), optimizer.prefetch, loss_chunk > 0)
