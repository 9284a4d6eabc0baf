"""How the layers of a stage are split over the processes of a mesh."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.layers.dispatch import Form
from megapipe.layers.parameter import TORCH_DTYPES, Sharding
from megapipe.layout.dispatch import bandwidths
from megapipe.ops.kernels import Kernels


def make_sharding(config: Config, mesh: ParallelMesh, kernels: Kernels) -> Sharding:
    """Make the :class:`Sharding` of one stage, with a weight-gradient queue of its own."""
    dtype, split = TORCH_DTYPES[config.model.dtype], config.parallel.sequence_parallel
    given = Sharding(mesh.tp, split, dtype, kernels=kernels)
    if config.model.moe.experts is None:
        return given
    experts = config.experts
    form = Form(
        gathers=experts.dispatch == "all_gather",
        fetches=experts.dispatch == "fetch",
        hops=mesh.expert_hops,
        chunks=experts.number_of_chunks,
        codec=experts.codec,
        pad=experts.pad,
    )
    near = bandwidths(config, mesh.ep.index)
    return replace(
        given, sequence=mesh.sequence, ep=mesh.ep, etp=mesh.grid.etp, form=form, bandwidths=near
    )
