"""A mesh for planning: only one rank exists, and its collectives send nothing.

Collectives are recorded and return at once. Tensors are on torch's meta device.
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
    "allreduce": ("all_reduce", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
}
"""Collective and argument index of its whole tensor, by the name of a process group's method.
torch 2.13 renamed some methods."""
BY_MESSAGES = {gloo.SUM: "reduce_scatter", gloo.GATHER: "all_gather", gloo.SPREAD: "all_gather"}
"""Collective by tag of its messages, which gloo sends in equal size to all members."""


class Collective(NamedTuple):
    """A recorded collective or sent message."""

    kind: str
    """One of all_reduce, all_gather, reduce_scatter, all_to_all and send."""
    ranks: tuple[int, ...]
    """Ranks of the group."""
    bytes: int
    """Bytes of the whole tensor: the gathered one, or the one that is summed or distributed."""
    dtype: torch.dtype
    group: object
    """The planned process group that recorded the collective."""


class _Complete:
    """A handle of a completed operation."""

    def wait(self) -> bool:
        return True


class _PlannedGroup:
    """Replacement for a process group: it sends nothing, and only records collectives."""

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
            self._record(kind, [given] if isinstance(given, Tensor) else given)
            return _Complete()

        return call

    def send(self, tensors: Sequence[Tensor], member: int, tag: int) -> _Complete:
        """Record a message; if a collective consists of such messages, record it at one of them."""
        if tag not in BY_MESSAGES:
            self._record("send", tensors)
        elif member == (self._index + 1) % len(self._ranks):
            self._record(BY_MESSAGES[tag], tensors, parts=len(self._ranks))
        return _Complete()

    def _record(self, kind: str, tensors: Sequence[Tensor], parts: int = 1) -> None:
        nbytes = sum(prod(each.shape) * each.element_size() for each in tensors)
        dtype = tensors[0].dtype
        self._note(Collective(kind, self._ranks, parts * nbytes, dtype, self))

    def recv(self, *_: Any) -> _Complete:
        """Return a completed receive. Nothing is recorded, as the sender records the message."""
        return _Complete()

    def size(self) -> int:
        return len(self._ranks)


class PlannedMesh(ParallelMesh):
    """The mesh that `rank` of a job would have, without processes.

    `backend` is the job's backend. With gloo, collectives allocate memory for messages; with NCCL
    they allocate none, because NCCL has its own buffers. `note` is called with each collective.
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
