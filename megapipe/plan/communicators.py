"""Groups that a process is in on GPUs, and the memory there that no tensor has.

The figures are estimates, and say where they come from; a communicator's memory grows with the
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
"""A CUDA context with the kernels of torch and its libraries. Assumed; nvidia-smi shows it of a
process that has made one small tensor."""
CUBLAS = 32 * MIB
"""Workspace of matrix products, which torch's allocator keeps for the stream that they run on: 8
pieces of 4 MiB on Hopper and later, and where ``run.deterministic`` asks for them; 8 MiB before
(torch, aten/src/ATen/cuda/CublasHandlePool.cpp). In all cases the larger is planned."""
PAIR, LARGER = 544 * MIB, 688 * MIB
"""NCCL's memory for collectives of two GPUs, and of more: measured on 4 A100 over NVLink
(github.com/NVIDIA/nccl/issues/964)."""
THREAD_BLOCK = 20 * MIB
"""NCCL's memory for one thread block of a channel: buffers of 4 MiB (NCCL_BUFFSIZE) and of the two
low-latency protocols, taken to be about as large again, each way."""


class Communicators(NamedTuple):
    """Communicators of a process."""

    groups: tuple[int, ...]
    """Members of each group that has collectives, two or more."""
    channels: int
    """Ends of channels between pipeline ranks, each a group of two; also of those for a tied
    embedding of which one stage has a copy."""

    @property
    def number(self) -> int:
        return len(self.groups) + self.channels

    def nbytes(self, thread_blocks: int) -> int:
        """About how many bytes they take on a GPU, where a channel has so many thread blocks."""
        groups = sum(PAIR if members == 2 else LARGER for members in self.groups)
        return groups + self.channels * thread_blocks * THREAD_BLOCK


def communicators(config: Config, layout: Layout, rank: int) -> Communicators:
    """Those of a process at pipeline index `rank`."""
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
    """Bytes on a GPU that no tensor of the run has."""
    if config.parallel.backend == "gloo":
        return CONTEXT + CUBLAS
    made = communicators(config, layout, rank)
    return CONTEXT + CUBLAS + made.nbytes(config.pipeline.channel_ctas)
