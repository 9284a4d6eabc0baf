"""NCCL communicators of a process, and other GPU memory that belongs to no tensor.

The sizes are estimates; each constant names its source. A communicator's memory grows with the
thread blocks that NCCL runs for it, and with the speed of the links.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.update_rules import declaration
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.schedule.lower import pairs

MIB = 2**20
CONTEXT = 512 * MIB
"""Bytes of a CUDA context with the kernels of torch and its libraries: an assumption. nvidia-smi
shows the real size for a process that has made one small tensor."""
CUBLAS = 32 * MIB
"""Bytes of cuBLAS's workspace, which torch's allocator keeps per stream: 8 x 4 MiB on Hopper and
later, and with ``run.deterministic``; 8 MiB on older GPUs (torch,
aten/src/ATen/cuda/CublasHandlePool.cpp). The plan always assumes 32 MiB."""
PAIR, LARGER = 544 * MIB, 688 * MIB
"""Bytes of an NCCL communicator for collectives of two GPUs, and of more than two: measured on 4
A100 over NVLink (github.com/NVIDIA/nccl/issues/964)."""
THREAD_BLOCK = 20 * MIB
"""Bytes that NCCL takes for one thread block of a channel: buffers of 4 MiB (NCCL_BUFFSIZE) and of
the two low-latency protocols, assumed to be about as large, in each direction."""


class Communicators(NamedTuple):
    """Sizes and number of a process's communicators."""

    groups: tuple[int, ...]
    """Size of each group with collectives that has two or more ranks."""
    channels: int
    """Number of point-to-point communicators, each with two ranks: channels to other pipeline
    ranks, and channels between the two stages with a tied embedding."""

    @property
    def number(self) -> int:
        return len(self.groups) + self.channels

    def nbytes(self, thread_blocks: int) -> int:
        """Return the approximate GPU bytes; a channel runs `thread_blocks` thread blocks."""
        groups = sum(PAIR if members == 2 else LARGER for members in self.groups)
        return groups + self.channels * thread_blocks * THREAD_BLOCK


def communicators(config: Config, layout: Layout, rank: int) -> Communicators:
    """Return the communicators of a process at pipeline index `rank`."""
    split = layout.split
    groups = {"tp": layout.tp, "ring": split.ring, "ulysses": split.ulysses}
    groups["ep"] = layout.ep_ranks
    if layout.ranks_per_node is not None:
        groups["ep in a node"] = layout.ranks_per_node
        groups["ep between nodes"] = layout.ep_ranks // layout.ranks_per_node
    if layout.ep > 1 and not declaration(config.optimizer.rule).elementwise:
        groups["etp"] = layout.etp
    if layout.model.experts() and layout.cp > 1:
        groups["cp*tp"] = layout.cp * layout.tp
    ends = 0
    for bucket in process_buckets(config, layout, rank):
        ends += 2 if bucket.link else 0
        for group in (bucket.shard, bucket.replicate):
            groups[group.axis] = max(group.members, groups.get(group.axis, 1))
    used = [] if layout.in_process else pairs(layout.schedule.placement)
    return Communicators(
        tuple(members for members in groups.values() if members > 1),
        sum(rank in pair for pair in used) + ends,
    )


def beside_tensors(config: Config, layout: Layout, rank: int) -> int:
    """Return the GPU bytes of a process outside of the run's tensors: CUDA, cuBLAS, NCCL."""
    if config.parallel.backend == "gloo":
        return CONTEXT + CUBLAS
    made = communicators(config, layout, rank)
    return CONTEXT + CUBLAS + made.nbytes(config.pipeline.p2p_max_ctas)
