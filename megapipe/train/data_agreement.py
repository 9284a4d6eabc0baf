"""A check that ranks which share micro-batches have received the same samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from torch import Tensor

from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import AxisName, ParallelMesh
from megapipe.errors import DataError

SHARE: tuple[AxisName, ...] = ("cp", "tp")
"""Axes whose ranks compute with the same samples."""


def checksum(samples: Iterable[Tensor]) -> int:
    """Return one checksum of all tensors, on the CPU, in their order."""
    found = 0
    for values in samples:
        found = zlib.crc32(values.contiguous().numpy().data, found)
    return found


def check_same_data(own: int, step: int, mesh: ParallelMesh) -> None:
    """Raise :class:`DataError` on every rank if a rank's checksum `own` of a step's samples differs
    from that of the first rank in its cp or tp group. Collective."""
    error = None
    for name in SHARE:
        first, *others = mesh.gather(str(own), name) or [""]
        different = [index for index, other in enumerate(others, 1) if other != first]
        if different and error is None:
            ranks = getattr(mesh, name).ranks
            error = DataError(
                f"rank {ranks[different[0]]} got other samples for step {step} than rank "
                f"{ranks[0]}, with which it shares micro-batches (parallel.{name}): expected "
                "a data source that gives all ranks the same sample for a number"
            )
    raise_on_all(mesh, error)
