"""A mesh of which only one rank exists, and that one only to be planned.

Its collectives send nothing and return at once; they are noted. Tensors are on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megapipe.distributed import gloo
from megapipe.distributed.mesh import Axis, Grid, ParallelMesh

COLLECTIVES = {
    # method of a process group: the collective, and which argument is the whole tensor
    "allreduce": ("all_reduce", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
}
"""torch renamed some in version 2.13."""
BY_MESSAGES = {gloo.SUM: "reduce_scatter", gloo.GATHER: "all_gather", gloo.SPREAD: "all_gather"}
"""Collectives that gloo sends as messages to all other members, equally long, by their tags."""


class Collective(NamedTuple):
    """A collective, or a message that is sent."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send."""
    ranks: tuple[int, ...]
    """Members of the group."""
    bytes: int
    """Size of the whole tensor: what is gathered, or what is to be summed or shared out."""
    dtype: torch.dtype
    group: object
    """The planned process group."""


class _Complete:
    """A work that is complete."""

    def wait(self) -> bool:
        return True


class _PlannedGroup:
    """Has the methods of a process group that collectives call."""

    def __init__(
        self, ranks: tuple[int, ...], index: int, note: Callable[[Collective], None]
    ) -> None:
        self._ranks, self._index, self._note = ranks, index, note

    def __getattr__(self, name: str) -> Callable[..., _Complete]:
        if name not in COLLECTIVES:
            raise AttributeError(f"a planned process group has no {name}")
        kind, whole = COLLECTIVES[name]

        def call(*arguments: Any) -> _Complete:
            given = arguments[whole]
            self._told(kind, [given] if isinstance(given, Tensor) else given)
            return _Complete()

        return call

    def send(self, tensors: Sequence[Tensor], member: int, tag: int) -> _Complete:
        """Note a message; a collective with the message to the next member."""
        if tag not in BY_MESSAGES:
            self._told("send", tensors)
        elif member == (self._index + 1) % len(self._ranks):
            self._told(BY_MESSAGES[tag], tensors, parts=len(self._ranks))
        return _Complete()

    def _told(self, kind: str, tensors: Sequence[Tensor], parts: int = 1) -> None:
        nbytes = sum(prod(each.shape) * each.element_size() for each in tensors)
        dtype = tensors[0].dtype
        self._note(Collective(kind, self._ranks, parts * nbytes, dtype, self))

    def recv(self, *_: Any) -> _Complete:
        """Receive a message, which its sender counts."""
        return _Complete()

    def size(self) -> int:
        return len(self._ranks)


class PlannedMesh(ParallelMesh):
    """The mesh as `rank` of a job would have it; there are no processes.

    `backend` is that of the job. With gloo collectives take the memory that their messages take;
    with NCCL none, its own buffers aside. `note` is called for each collective.
    """

    def __init__(
        self, grid: Grid, rank: int, backend: str, note: Callable[[Collective], None]
    ) -> None:
        self._note = note
        self._enter(grid, rank, backend, torch.device("meta"), 0.0, None)

    def connected(self, axis: Axis) -> Axis:
        return axis

    def _new_axis(
        self, ranks: Sequence[int], backend: str | None = None, *, options: Any = None
    ) -> Axis:
        if len(ranks) == 1:
            return Axis.alone(self.rank)
        members, backend = tuple(ranks), backend or self.backend
        index = members.index(self.rank)
        group = cast(Any, _PlannedGroup(members, index, self._note))
        return Axis(len(members), index, members, group, "gloo" if backend == "gloo" else "planned")
