"""Placements of a value on a mesh of devices: split, broadcast or partial along each mesh axis.

The three kinds and the term boxing are OneFlow's SBP (2110.15032). A mesh here is a table of
simulated devices, not the process mesh of :mod:`megapipe.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from megapipe.errors import ConfigError

Shape = tuple[int, ...]
Coordinates = tuple[int, ...]


class Placement(NamedTuple):
    """How a value lies on the devices of one mesh axis."""

    kind: str
    """S: device i has the ith part of a dimension. B: every device has the value. P: the value is
    the sum over the devices."""
    dim: int = -1
    """The dimension that is split; -1 for B and P."""

    def __str__(self) -> str:
        return f"S{self.dim}" if self.kind == "S" else self.kind


BROADCAST = Placement("B")
PARTIAL = Placement("P")
Placements = tuple[Placement, ...]
"""One placement for each mesh axis."""


def split(dim: int) -> Placement:
    """Return the placement that splits a dimension."""
    return Placement("S", dim)


def shown(placements: Placements) -> str:
    """Return placements as text, for example ``S0,B``."""
    return ",".join(map(str, placements))


@dataclass(frozen=True)
class Mesh:
    """Named axes of simulated devices.

    Raises:
        ConfigError: an axis without a device, or two axes of one name.
    """

    axes: tuple[tuple[str, int], ...]
    """Name and number of devices of each axis, the major one first."""

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if size < 1:
                raise ConfigError(f"mesh: axis {name} has {size} devices; at least 1 is needed")
        if len(set(self.names)) < len(self.axes):
            raise ConfigError(f"mesh: axes {', '.join(self.names)}: each needs a name of its own")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices of each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> list[Coordinates]:
        """Coordinates of all devices, the last axis fastest."""
        return list(product(*map(range, self.sizes)))

    @property
    def replicated(self) -> Placements:
        """The placements of a value that every device has."""
        return (BROADCAST,) * len(self.axes)

    def index(self, name: str) -> int:
        """Return the index of an axis. Raises ConfigError for an unknown name."""
        if name not in self.names:
            raise ConfigError(f"mesh: axis {name!r} is unknown; axes are {', '.join(self.names)}")
        return self.names.index(name)


def parts(placements: Placements, sizes: Sequence[int], dim: int) -> int:
    """Return into how many parts a dimension is split."""
    return prod(size for place, size in zip(placements, sizes, strict=True) if place == split(dim))


def divides(shape: Shape, placements: Placements, sizes: Sequence[int]) -> bool:
    """Whether every split dimension exists and has parts of equal length."""
    dims = {place.dim for place in placements if place.kind == "S"}
    return all(dim < len(shape) and shape[dim] % parts(placements, sizes, dim) == 0 for dim in dims)


def local_shape(shape: Shape, placements: Placements, sizes: Sequence[int]) -> Shape:
    """Return the shape of the pieces of a value."""
    return tuple(length // parts(placements, sizes, dim) for dim, length in enumerate(shape))
