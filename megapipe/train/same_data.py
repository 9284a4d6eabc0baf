"""Whether ranks that share micro-batches were given the same samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from torch import Tensor

from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import AxisName, ParallelMesh
from megapipe.errors import DataError

SHARE: tuple[AxisName, ...] = ("cp", "tp")
"""Ranks along these axes compute with the same samples."""


def checksum(samples: Iterable[Tensor]) -> int:
    """Of values on the CPU, in this order."""
    found = 0
    for values in samples:
        found = zlib.crc32(values.contiguous().numpy().data, found)
    return found


def check_same_data(own: int, step: int, mesh: ParallelMesh) -> None:
    """Raise :class:`DataError` on every rank where ranks of a cp or tp group have other checksums
    of a step's samples than the first of them. All ranks call it."""
    error = None
    for name in SHARE:
        first, *others = mesh.gather(str(own), name) or [""]
        different = [index for index, other in enumerate(others, 1) if other != first]
        if different and error is None:
            ranks = getattr(mesh, name).ranks
            error = DataError(
                f"rank {ranks[different[0]]} was given other samples for step {step} than rank "
                f"{ranks[0]}, with which it shares micro-batches (parallel.{name}): expected a "
                "data source that gives all ranks the same sample for a number"
            )
    raise_on_all(mesh, error)
