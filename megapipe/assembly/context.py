"""Makes the context-parallel groups of a process, and passes on the layout's ring plans."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layers.context import ContextAttention
from megapipe.layers.ring_attention import Ring
from megapipe.layout.layout import Layout
from megapipe.ops.packed_tile_kernels import PackedTileKernel
from megapipe.ops.tile_attention import TileKernel


def make_context(
    layout: Layout,
    mesh: ParallelMesh,
    kernel: TileKernel,
    packed: PackedTileKernel | None = None,
) -> ContextAttention:
    """Make this process's context-parallel attention: its ring and Ulysses groups, with the
    layout's ring plans. `kernel` computes one attention tile, `packed` many short tiles in one
    call. Collective over cp."""
    split = layout.split
    ring, ulysses = split.coordinates(mesh.cp.index)
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
    """Return this rank's group, which has the ranks `indices` along cp. Collective over cp."""
    ranks = [mesh.cp.ranks[index] for index in indices]
    if len(ranks) == 1:
        return Axis.alone(mesh.rank)
    if len(ranks) == mesh.cp.size and mesh.backend != "nccl":
        return mesh.cp
    return mesh.connected(mesh.group_of(ranks))
