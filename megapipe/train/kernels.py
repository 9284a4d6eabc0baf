"""The kernels of a run, the same on every rank."""

from __future__ import annotations

import torch

from megapipe.config import Config
from megapipe.errors import LaunchError, MegapipeError
from megapipe.mesh import ParallelMesh
from megapipe.ops.kernels import Kernels
from megapipe.ops.select import select_kernels
from megapipe.train.agreement import all_or_none


def agreed_kernels(config: Config, mesh: ParallelMesh, dtype: torch.dtype, *, cut: bool) -> Kernels:
    """This process' kernels for a model of `dtype`; `cut`: its sequences come in slices.

    Raises on every rank if one cannot have what is asked for by name, or :class:`LaunchError` if
    it would use others than rank 0: a package may be missing on a node. On CPUs there is no choice.
    """
    if mesh.device.type == "cpu":
        return select_kernels(config, mesh.device, dtype, cut=cut)
    kernels, error = Kernels(), None
    try:
        kernels = select_kernels(config, mesh.device, dtype, cut=cut)
    except MegapipeError as problem:
        error = problem
    own = ", ".join(f"{choice.purpose} {choice.name}" for choice in kernels.choices)
    first = mesh.share(own)
    if error is None and own != first:
        error = LaunchError(
            f"rank {mesh.rank} would use the kernels {own}, and rank 0 {first}: install the same "
            "packages on every node, or name the kernels (kernels.*)"
        )
    all_or_none(mesh, error)
    return kernels
