"""The process mesh: the only owner of ranks and process groups.

:class:`ParallelMesh` adds the process groups of the axes to a :class:`Grid`, in its order, and
makes those that pipeline and optimizer ask for; each process enters only the groups that it belongs
to, so making them costs the same in any world.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megapipe.distributed.axis import Axis as Axis
from megapipe.distributed.collectives import (
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_all_to_all,
)
from megapipe.distributed.environment import (
    ALLOCATOR,
    CONNECTIONS,
    LOADING,
    set_environment,
)
from megapipe.distributed.gloo import await_messages_for
from megapipe.distributed.grid import AXES as AXES
from megapipe.distributed.grid import AxisName as AxisName
from megapipe.distributed.grid import Grid as Grid
from megapipe.distributed.grid import MeshCoordinates as MeshCoordinates
from megapipe.errors import LaunchError
from megapipe.util.lived import await_keys
from megapipe.watch.journal import Journal, text

SUSPENDED = datetime.timedelta(days=7)
"""For how long at most a job may be suspended."""


def sum_in_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Sum the rows of `parts`, [n, ...]: neighbours, then neighbouring pairs, and so on.

    One order of additions for any number of rows and any device, in log2 n operations.
    """
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts = torch.cat((parts[0:even:2] + parts[1:even:2], parts[even:]))
    return parts[0]


def _combine(parts: torch.Tensor, largest: int) -> torch.Tensor:
    """[ranks, n] -> [n]: sums, and at the end `largest` values that are the largest of any rank."""
    if not largest:
        return sum_in_pairs(parts)
    return torch.cat([sum_in_pairs(parts[:, :-largest]), parts[:, -largest:].amax(0)])


def group_name(ranks: Sequence[int], twins: int) -> str:
    """The name of a group of `ranks` where `twins` others of exactly these ranks exist."""
    members = ",".join(map(str, ranks))
    return f"{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}.{twins}"


def world_size() -> int | None:
    """Ranks of torch's default process group; None where this process is in none."""
    return dist.get_world_size() if dist.is_initialized() else None


def _set_environment(*, sends_messages: bool) -> None:
    """For those who make a mesh themselves what a run sets at its start."""
    late = torch.cuda.is_initialized()
    new = set_environment(
        os.environ,
        sends_messages=sends_messages,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    unheard = [name for name in new if name in (CONNECTIONS, LOADING, *ALLOCATOR)]
    if late and unheard:
        values = " ".join(f"{name}={os.environ[name]}" for name in unheard)
        warnings.warn(
            f"CUDA was in use before the mesh of processes, and does not see {values}: expected "
            "these variables in the environment",
            stacklevel=3,
        )


class ParallelMesh:
    """Process groups of a grid, and the few exchanges of scalars and texts that need no tensor.

    The default process group must exist (:func:`megapipe.launch.rendezvous.start_process_group`).
    On a GPU environment variables that are not set get the values that a run gives them
    (:mod:`megapipe.distributed.environment`), which CUDA heeds if it was not in use before.

    Where `journal` is given this process notes there what it does, and for whom it waits.

    Raises :class:`LaunchError` when the world does not match the grid.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        device: torch.device,
        timeout_s: float,
        journal: Journal | None = None,
    ) -> None:
        if dist.get_world_size() != grid.world:
            raise LaunchError(
                f"world size {dist.get_world_size()} does not match the mesh "
                f"pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp} = {grid.world}"
            )
        if device.type == "cuda":
            _set_environment(sends_messages=grid.pp > 1)
        await_messages_for(None)  # of an earlier run of this process
        self._enter(grid, dist.get_rank(), dist.get_backend(), device, timeout_s, journal)

    def _enter(
        self,
        grid: Grid,
        rank: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        journal: Journal | None,
    ) -> None:
        """Take the place of `rank` and make the groups of its axes."""
        self.grid = grid
        self.rank = rank
        self.world = grid.world
        self.at = grid.coordinates_of(self.rank)
        self.device = device
        self.backend = backend
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._exchanges = 0
        self.journal = Journal() if journal is None else journal
        self.journal.is_at(self.at.words)
        self._first = self.journal.counter("texts", range(self.world), heeds=[0])
        """Where all wait for texts of rank 0."""
        self._computed = self.journal.counter("device", range(self.world))
        """Where each waits for its device, which may wait for those of others."""
        peers = {axis: grid.peers(self.rank, axis) for axis in AXES}

        def axes_of(backend: str, names: Sequence[AxisName]) -> dict[AxisName, Axis]:
            made = {name: self._new_axis(peers[name], backend) for name in names}
            return {name: self.connected(axis) for name, axis in made.items()}

        nccl = self.backend == "nccl"
        self._host = axes_of("gloo" if nccl else self.backend, AXES)
        """For numbers that the host has and needs: no GPU waits, or is waited for."""
        self.pp, self.dp, self.cp = (self._host[name] for name in ("pp", "dp", "cp"))
        """Their ranks share numbers alone: messages between stages have channels, what replicas
        share has groups of its own, which only the optimizer knows, and so have the rings and heads
        of cp, which :mod:`megapipe.assembly.context` knows."""
        self.tp = axes_of(self.backend, ["tp"])["tp"] if nccl else self._host["tp"]

    def group_of(self, ranks: Sequence[int], *, ctas: int | None = None) -> Axis:
        """A new process group of `ranks` (ascending), entered by its members alone.

        `ctas`: the most thread blocks that NCCL runs for it, each on a multiprocessor of the GPU's,
        also while a receive waits for its message.

        NCCL connects a group on first use, and where first uses come in different orders on
        different ranks they hang. The caller therefore uses it at once, in an order that all its
        members share, as :meth:`connected` does.
        """
        options = None
        if ctas is not None and self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            options._timeout = self.timeout
        return self._new_axis(ranks, options=options)

    def host_group_of(self, ranks: Sequence[int]) -> Axis:
        """The same for what is in host memory; it is connected. No GPU waits, or is waited for."""
        return self.connected(self._new_axis(ranks, "gloo"))

    def connected(self, axis: Axis) -> Axis:
        """Set up the axis' communicator for collectives, by making some; returns `axis`."""
        if axis.group is None:
            return axis
        on_nccl = axis.backend == "nccl"
        numbers = torch.zeros(axis.size, device=self.device if on_nccl else "cpu")
        dist.all_reduce(numbers, group=axis.group)
        if on_nccl:  # which makes ready for each kind at its first call
            all_gather(numbers, axis)
            reduce_scatter(numbers, axis)
            start_all_to_all(numbers, axis)[1]()
        return axis

    def _new_axis(
        self, ranks: Sequence[int], backend: str | None = None, *, options: Any = None
    ) -> Axis:
        """A new group; one rank has none, whose threads would look for messages that never come."""
        if len(ranks) == 1:
            return Axis.alone(self.rank)
        backend = backend or self.backend
        group = self._new_group(ranks, backend, options)
        line = self.journal.counter(dist.distributed_c10d._world.pg_names[group], ranks)
        return Axis(len(ranks), list(ranks).index(self.rank), tuple(ranks), group, backend, line)

    def _new_group(self, ranks: Sequence[int], backend: str, options: Any) -> dist.ProcessGroup:
        """A group as of ``dist.new_group``, under a name on which the members agree.

        They find each other by the name. torch's own name counts the groups that a process has
        made, of whatever ranks, and members need not have made equally many.
        """
        assert list(ranks) == sorted(ranks), f"{ranks} are not in ascending order"
        c10d = dist.distributed_c10d
        others = c10d._world.pg_group_ranks
        twins = sum(list(members) == list(ranks) for members in others.values())
        name: Any = group_name(ranks, twins)
        meeting = self.journal.counter(f"meeting.{name}", ranks)
        make = functools.partial(
            c10d._new_process_group_helper,
            len(ranks),
            ranks.index(self.rank),
            list(ranks),
            dist.Backend(backend),
            c10d._get_default_store(),
            name,
            backend_options=options,
            timeout=self.timeout,
        )
        group, _ = meeting.wait(meeting.count(), make)
        others[group] = {rank: index for index, rank in enumerate(ranks)}
        return group

    def holders_of(self, pp_indices: Sequence[int]) -> Axis:
        """A new group of the ranks of several pipeline indices that have this one's other
        coordinates, for what is in host memory; this rank is alone where it is not among them."""
        if self.at.pp not in pp_indices:
            return Axis.alone(self.rank)
        ranks = (self.grid.rank_of(self.at._replace(pp=index)) for index in pp_indices)
        return self.host_group_of(sorted(ranks))

    @functools.cached_property
    def sequence(self) -> Axis:
        """Ranks with parts of the same sequences: cp x tp, where these split activations. All of
        them ask for it at once."""
        at, grid = self.at, self.grid
        if grid.cp == 1 or (grid.tp == 1 and self.backend != "nccl"):
            return self.tp if grid.cp == 1 else self.cp
        first = grid.rank_of(at._replace(cp=0, tp=0))
        return self.connected(self.group_of(range(first, first + grid.cp * grid.tp)))

    @functools.cached_property
    def ep(self) -> Axis:
        """The ep x etp ranks that share what is split over ep. All of them ask for it at once."""
        return self.connected(self.group_of(self.grid.ep_peers(self.rank)))

    @functools.cached_property
    def ep_hops(self) -> tuple[Axis, Axis] | None:
        """Of these, the ranks of this one's node, and those that have its place in each node; None
        where ``grid.ranks_per_node`` is. All of them ask for it at once."""
        if self.grid.ranks_per_node is None:
            return None
        inner, outer = map(self.group_of, self.grid.ep_hops(self.rank))
        return self.connected(inner), self.connected(outer)

    @functools.cached_property
    def etp(self) -> Axis:
        """The etp ranks that have the same indices over ep, and split their width. All of them ask
        for it at once."""
        size = self.grid.etp
        if self.grid.ep == 1:
            return self.ep
        first = self.rank - self.rank % size
        return self.connected(self.group_of(range(first, first + size)))

    def ordered_sum(
        self, vector: torch.Tensor, *axes: AxisName | Axis, largest: int = 0
    ) -> torch.Tensor:
        """Sum a 1-D `vector` in host memory over the axes, one after the other, each by
        :func:`sum_in_pairs`.

        The last `largest` values are not summed: the result has their maxima over the axes.

        Unlike an all-reduce, the order of the additions does not depend on the backend or on
        the place in a buffer, so the result is bitwise the same on every rank and in every
        schedule.
        """
        for given in axes:
            axis = given if isinstance(given, Axis) else self._host[given]
            if axis.group is not None:
                vector = _combine(all_gather(vector, axis).view(axis.size, -1), largest)
        return vector

    def start_ordered_sum(
        self, vector: torch.Tensor, name: AxisName, *, largest: int = 0
    ) -> Callable[[], torch.Tensor]:
        """Begin an :meth:`ordered_sum` over one axis; the returned function waits for the sum."""
        axis = self._host[name]
        if axis.group is None:
            return lambda: vector
        parts = vector.new_empty(axis.size * len(vector))
        wait = start_all_gather(parts, vector, axis)

        def result() -> torch.Tensor:
            wait()
            return _combine(parts.view(axis.size, -1), largest)

        return result

    def to_host(self, values: torch.Tensor) -> list[float]:
        """Numbers of the device's, once it has computed them; all ranks call it."""
        self.journal.set_activity(text("adding up the totals"))
        numbers: list[float] = self._computed.wait(self._computed.count(), values.tolist)
        return numbers

    def gather_numbers(self, own: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks: [n] int64 in host memory, as many on each -> [world, n]."""
        whole = own.unsqueeze(0)
        for name in reversed(AXES):
            whole = all_gather(whole, self._host[name])
        return whole

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        value = torch.tensor([float(flag)])
        for axis in self._host.values():
            if axis.group is not None:
                number = axis.line.count()
                largest = dist.ReduceOp.MAX
                work = dist.all_reduce(value, op=largest, group=axis.group, async_op=True)
                axis.line.wait(number, work.wait)
        return bool(value.item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    @functools.cached_property
    def store(self) -> dist.Store:
        """Keys and values that all ranks see."""
        return dist.HashStore() if self.world == 1 else dist.distributed_c10d._get_default_store()

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.world == 1:
            return text
        key, number = self._next_key(), self._first.count()
        if self.rank == 0:
            self.store.set(key, text)
            return text

        def told() -> bytes:
            await_keys(self.store, [key], self.timeout.total_seconds())
            value: bytes = self.store.get(key)
            return value

        return self._first.wait(number, told).decode()

    def gather(self, text: str, name: AxisName) -> list[str]:
        """The texts of an axis by index, on its first rank; nothing on the others."""
        axis = self._host[name]
        if axis.group is None:
            return [text]
        content = text.encode()
        lengths = all_gather(torch.tensor([len(content)]), axis).tolist()
        padded = bytearray(content.ljust(max(*lengths, 1)))  # nothing cannot be sent
        rows = all_gather(torch.frombuffer(padded, dtype=torch.uint8), axis).view(axis.size, -1)
        if axis.index > 0:
            return []
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]

    def long_barrier(self, patience: datetime.timedelta) -> None:
        """Wait until every rank is here, for up to `patience`, also beyond a group's timeout."""
        if self.world == 1:
            return
        key = self._next_key()
        if self.store.add(f"{key}/arrived", 1) == self.world:
            self.store.set(key, "")
        await_keys(self.store, [key], patience.total_seconds())

    def agree(self, error: str | None) -> str | None:
        """The error text of one rank that has one, the same on every rank; None if none has."""
        if self.world == 1:
            return error
        key = self._next_key()
        if error is not None:
            self.store.compare_set(key, "", error)
        if not self.any(error is not None):
            return None
        value: bytes = self.store.get(key)
        return value.decode()

    def leave_hangs_to_monitors(self) -> None:
        """Have the groups so far wait for longer than any job is suspended.

        Their own clocks go on while a process is stopped, and a time-out breaks a group for good.
        """
        for group in dist.distributed_c10d._world.pg_map:
            for device in group._device_types:
                with suppress(RuntimeError):  # it has nothing for the device, or no time-outs there
                    group._get_backend(device)._set_default_timeout(SUSPENDED)
        await_messages_for(SUSPENDED)

    def _next_key(self) -> str:
        self._exchanges += 1
        return f"megapipe/exchange/{self._exchanges}"
