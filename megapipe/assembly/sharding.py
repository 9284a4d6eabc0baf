"""How the layers of a stage are split over the processes of a mesh."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.layers.moe.dispatchers import make_dispatcher
from megapipe.layers.moe.sharding import MoESharding
from megapipe.layers.parameter import TORCH_DTYPES, Sharding
from megapipe.layout.moe.dispatch import bandwidths
from megapipe.ops.kernels import Kernels


def make_sharding(config: Config, mesh: ParallelMesh, kernels: Kernels) -> Sharding:
    """Make the :class:`Sharding` of one stage, with a separate weight-gradient queue."""
    dtype, split = TORCH_DTYPES[config.model.dtype], config.parallel.sequence_parallel
    if config.model.moe.num_experts is None and config.parallel.ep == 1:
        return Sharding(mesh.tp, split, dtype, kernels=kernels)
    return MoESharding(
        mesh.tp,
        split,
        dtype,
        kernels=kernels,
        sequence=mesh.sequence,
        dispatcher=make_dispatcher(config.experts, mesh),
        bandwidths=bandwidths(config, mesh.ep.index),
    )
