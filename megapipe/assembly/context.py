"""The context-parallel group of a process."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layers.context import ContextAttention
from megapipe.layers.ring_attention import Ring
from megapipe.layout.layout import Layout
from megapipe.ops.block_attention import TileKernel
from megapipe.ops.packed_kernels import PackedTileKernel


def make_context(
    layout: Layout,
    mesh: ParallelMesh,
    kernel: TileKernel,
    packed: PackedTileKernel | None = None,
) -> ContextAttention:
    """Groups and plans of this process, whose blocks are computed by `kernel`, and many short ones
    at once by `packed`. All ranks call it, where attention goes by blocks."""
    split = layout.split
    ring, ulysses = split.place(mesh.cp.index)
    return ContextAttention(
        ring=Ring(
            axis=_group(mesh, [split.index(i, ulysses) for i in range(split.ring)]),
            forward=layout.context.forward,
            backward=layout.context.backward,
            gathers=layout.context.gathers,
            kernel=kernel,
            packed=packed,
        ),
        ulysses=_group(mesh, [split.index(ring, j) for j in range(split.ulysses)]),
    )


def _group(mesh: ParallelMesh, indices: Sequence[int]) -> Axis:
    """The ranks of these indices along cp; all members of all such groups make them alike."""
    ranks = [mesh.cp.ranks[index] for index in indices]
    if len(ranks) == 1:
        return Axis.alone(mesh.rank)
    if len(ranks) == mesh.cp.size and mesh.backend != "nccl":
        return mesh.cp
    return mesh.connected(mesh.group_of(ranks))
