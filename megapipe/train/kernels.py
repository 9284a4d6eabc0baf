"""The kernels of a run, the same on every rank."""

from __future__ import annotations

from itertools import chain

from megapipe.config import Config
from megapipe.errors import LaunchError, MegapipeError
from megapipe.layout import Layout
from megapipe.mesh import ParallelMesh
from megapipe.model.compiled_check import check_compiled
from megapipe.model.gpt import TORCH_DTYPES
from megapipe.ops.kernels import Kernels
from megapipe.ops.select import select_kernels
from megapipe.schedule.ir import Schedule
from megapipe.tensor_parallel.parameter import Sharding
from megapipe.train.agreement import all_or_none


def agreed_kernels(
    config: Config, layout: Layout, mesh: ParallelMesh, schedule: Schedule
) -> Kernels:
    """This process' kernels for a run of `schedule`, checked, compiled blocks included.

    Raises on every rank if one cannot have what is asked for by name, or :class:`LaunchError` if
    it would use others than rank 0: a package may be missing on a node. A rank whose compiler
    fails raises alone, as its tp peers may be within a collective of the compiled block.
    """
    kernels = _selected(config, mesh, cut=schedule.slices > 1)
    if kernels.compiler is not None:
        rows = config.train.microbatch
        sizes = map(schedule.size_of, range(schedule.microbatches))
        check_compiled(
            config.model,
            make_sharding(config, mesh, kernels),
            length=config.train.sequence_length,
            rows={rows, *(int(size * rows) for size in sizes)},  # whole ones: validation
            again=bool(schedule.recompute)
            or any(unit.policy.recompute for unit in chain(*layout.units)),
            documents=config.data.document_mask,
            device=mesh.device,
        )
    return kernels


def make_sharding(config: Config, mesh: ParallelMesh, kernels: Kernels) -> Sharding:
    """How the layers of one more stage are split, with a queue of their own."""
    dtype = TORCH_DTYPES[config.model.dtype]
    return Sharding(mesh.tp, config.parallel.sequence_parallel, dtype, kernels=kernels)


def _selected(config: Config, mesh: ParallelMesh, *, cut: bool) -> Kernels:
    """What is usable here, if all ranks agree; on CPUs there is no choice. `cut`: sequences come
    in slices."""
    dtype = TORCH_DTYPES[config.model.dtype]
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
