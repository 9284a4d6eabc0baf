"""Rectangles of an n-dimensional tensor. Shard files store tensors as rectangles, for any layout.

Tensor parallelism cuts a parameter along one dimension, and ZeRO cuts the flat buffer that holds it
at any element. The result of either is a few rectangles of the global tensor. So a checkpoint
stores only rectangles, and loading into another layout intersects rectangles.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple


class Region(NamedTuple):
    """Elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` of a tensor, for every dim d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the region lies within a tensor of this shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= length
            for o, n, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def inside(self, outer: "Region") -> tuple[slice, ...]:
        """Return the slices that select this region in a tensor that holds the region `outer`."""
        starts = (o - base for o, base in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(o, o + n) for o, n in zip(starts, self.sizes, strict=True))


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of all elements of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def flat_regions(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, Region]]:
    """Cut elements [start, stop) of a row-major tensor into regions.

    Returns pairs (position, region), in flat order without gaps. Counted from `start`, the elements
    position .. position + region.numel - 1 are the region, reshaped to `region.sizes`. There are at
    most 2 n - 1 regions for n dimensions, and none for an empty range. Raises ValueError if the
    range leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range [{start}, {stop}) leaves a tensor of {prod(shape)} elements")
    position, cuts = 0, []
    for region in _cut(tuple(shape), start, stop):
        cuts.append((position, region))
        position += region.numel
    return cuts


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Yield the regions of elements [start, stop). A row is the elements with the same first index.
    First the end of an incomplete row is cut recursively, then all complete rows are one region,
    then the beginning of an incomplete row is cut recursively."""
    if start == stop:
        return
    if not shape:
        yield Region((), ())
        return
    row = prod(shape[1:])
    while start < stop:
        first, begin = divmod(start, row)
        full = (stop - start) // row
        if begin or not full:
            end = min(row, begin + stop - start)
            for inner in _cut(shape[1:], begin, end):
                yield Region((first, *inner.offsets), (1, *inner.sizes))
            start += end - begin
        else:
            yield Region((first, *(0,) * (len(shape) - 1)), (full, *shape[1:]))
            start += full * row


def intersect(a: Region, b: Region) -> Region | None:
    """Return the region of the elements that are in both regions; None if there are none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (
        min(i + n, j + m) for i, n, j, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def first_uncovered(
    shape: tuple[int, ...], regions: Iterable[Region]
) -> tuple[tuple[int, ...], int] | None:
    """Check that regions tile a tensor; return None if each element is in exactly one region.

    Otherwise return the first wrong element in row-major order (outside the tensor if a region
    leaves it), and the number of regions that contain it.

    The indicator function of a region is the n-fold running sum of signed unit masses on its 2^n
    corners, and a running sum can be inverted. So the regions tile the tensor if and only if the
    sum of their corner masses equals the tensor's. The first corner where the masses differ is the
    first wrong element, since only masses before an element contribute to its count. k regions cost
    O(k 2^n).
    """
    signs = [prod(corner) for corner in product((1, -1), repeat=len(shape))]
    excess: dict[tuple[int, ...], int] = defaultdict(int)
    for weight, region in ((-1, whole(shape)), *((1, region) for region in regions)):
        edges = [(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True)]
        for corner, sign in zip(product(*edges), signs, strict=True):
            excess[corner] += weight * sign
    wrong = min((corner for corner, mass in excess.items() if mass), default=None)
    if wrong is None:
        return None
    is_element = all(i < n for i, n in zip(wrong, shape, strict=True))
    return wrong, excess[wrong] + is_element
