"""Selection of a run's kernels, equal on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

from megapipe.assembly.context import make_context
from megapipe.assembly.kernels import select_kernels
from megapipe.assembly.sharding import make_sharding
from megapipe.command_line import phase
from megapipe.config.config import Config
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import LaunchError, MegapipeError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout.layout import Layout
from megapipe.ops.kernels import Kernels
from megapipe.schedule.ir import Schedule


def agreed_kernels(
    config: Config, layout: Layout, mesh: ParallelMesh, schedule: Schedule
) -> Kernels:
    """Select this process's kernels for `schedule`. If blocks are compiled, compile and check them.

    Raises on every rank if a rank cannot use a kernel that is requested by name, and
    :class:`LaunchError` if a rank would use other kernels than rank 0, for example because a
    package is missing. A rank whose compiler fails raises alone: its tp peers may be in a
    collective of the block.
    """
    kernels = _selected(config, layout, mesh, cut=schedule.slices > 1)
    if kernels.attention_tile is not None:
        kernels = replace(
            kernels,
            context=make_context(
                layout, mesh, kernels.attention_tile, kernels.packed_attention_tile
            ),
        )
    if kernels.compiler is not None:
        rows = config.train.microbatch
        sizes = map(schedule.size_of, range(schedule.microbatches))
        split, length = layout.split, config.train.sequence_length
        what = "compiling blocks (kernels.compile=true)"
        with phase(what, in_logs=True) if mesh.rank == 0 else nullcontext():
            layout.model.check_compiled(
                make_sharding(config, mesh, kernels),
                rows={rows, *(int(size * rows) for size in sizes)},  # in validation: whole
                recompute=bool(schedule.recompute)
                or any(span.policy.recompute for span in chain(*layout.block_policies)),
                documents=config.data.masks_documents,
                device=mesh.device,
                local_positions=None if split.cp == 1 else split.local([length], mesh.cp.index),
            )
    return kernels


def _selected(config: Config, layout: Layout, mesh: ParallelMesh, *, cut: bool) -> Kernels:
    """Select kernels that this device can use. On GPUs, raise unless all ranks select the same; on
    CPUs they always do. `cut`: sequences are cut into slices."""
    arguments = config, layout.model.kernel_needs, mesh.device, TORCH_DTYPES[config.model.dtype]
    split = layout.split if layout.uses_attention_tiles else None
    if mesh.device.type == "cpu":
        return select_kernels(*arguments, cut=cut, split=split)
    kernels, error = Kernels(), None
    try:
        kernels = select_kernels(*arguments, cut=cut, split=split)
    except MegapipeError as problem:
        error = problem
    own = ", ".join(f"{choice.purpose} {choice.name}" for choice in kernels.choices)
    first = mesh.share(own)
    if error is None and own != first:
        error = LaunchError(
            f"rank {mesh.rank} would use the kernels {own}, and rank 0 {first}: install the same "
            "packages on every node, or name the kernels (kernels.*)"
        )
    raise_on_all(mesh, error)
    return kernels
