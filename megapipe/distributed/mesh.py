"""The process mesh, which makes all process groups and knows the ranks.

:class:`ParallelMesh` adds process groups to a :class:`Grid`: those of the axes, and those that
pipeline and optimizer ask for. Each process enters only the groups that it belongs to, so the cost
of making groups does not depend on the size of the world.
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
"""Maximum time for which a job can be suspended and still continue afterwards."""


def sum_in_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Sum the rows of `parts`, [n, ...]: first neighbours, then neighbouring pairs, and so on.

    The order of additions is the same on any device, and log2 n operations are needed.
    """
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts = torch.cat((parts[0:even:2] + parts[1:even:2], parts[even:]))
    return parts[0]


def _combine(parts: torch.Tensor, largest: int) -> torch.Tensor:
    """Reduce [ranks, n] -> [n]: maxima for the last `largest` values, sums for the others."""
    if not largest:
        return sum_in_pairs(parts)
    return torch.cat([sum_in_pairs(parts[:, :-largest]), parts[:, -largest:].amax(0)])


def group_name(ranks: Sequence[int], twins: int) -> str:
    """Return a name for a group of `ranks`. `twins`: number of earlier groups of these ranks."""
    members = ",".join(map(str, ranks))
    return f"{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}.{twins}"


def world_size() -> int | None:
    """Return the size of torch's default process group; None if this process has none."""
    return dist.get_world_size() if dist.is_initialized() else None


def _set_environment(*, sends_messages: bool) -> None:
    """Set the environment variables that a run sets at its start, in case a script has not."""
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
            f"CUDA was initialized before the mesh, so it ignores {values}: set these "
            "variables in the environment",
            stacklevel=3,
        )


class ParallelMesh:
    """The process groups of a grid, and exchanges of a few scalars and texts on the host.

    The default process group must exist (:func:`megapipe.launch.rendezvous.start_process_group`).
    On a GPU, unset environment variables get the values that a run gives them
    (:mod:`megapipe.distributed.environment`). CUDA ignores those values if it was in use before.

    `journal`: file in which this process records what it does and for which ranks it waits.

    Raises :class:`LaunchError` if the world size does not match the grid.
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
        await_messages_for(None)  # resets the limit of an earlier run of this process
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
        """Take the position of `rank` in the grid, and make the groups of its axes."""
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
        """Journal counter for the waits of all ranks for texts from rank 0."""
        self._computed = self.journal.counter("device", range(self.world))
        """Journal counter for waits for the device, which may itself wait for other ranks."""
        peers = {axis: grid.peers(self.rank, axis) for axis in AXES}

        def axes_of(backend: str, names: Sequence[AxisName]) -> dict[AxisName, Axis]:
            made = {name: self._new_axis(peers[name], backend) for name in names}
            return {name: self.connected(axis) for name, axis in made.items()}

        nccl = self.backend == "nccl"
        self._host = axes_of("gloo" if nccl else self.backend, AXES)
        """Axes for values in host memory. Their collectives use no GPU."""
        self.pp, self.dp, self.cp = (self._host[name] for name in ("pp", "dp", "cp"))
        """Axes for host values only. Other groups carry tensors: stages send over channels, the
        optimizer makes the groups of replicas, and :mod:`megapipe.assembly.context` makes those of
        the rings and head exchanges of cp."""
        self.tp = axes_of(self.backend, ["tp"])["tp"] if nccl else self._host["tp"]

    def group_of(self, ranks: Sequence[int], *, ctas: int | None = None) -> Axis:
        """Make a process group of `ranks`, in ascending order. Only its members call this.

        `ctas`: maximum number of thread blocks that NCCL runs for the group. Each thread block
        occupies a multiprocessor of the GPU, even while a receive waits for its message.

        NCCL connects a group on first use, and hangs if ranks use several groups for the first time
        in different orders. So the caller must use the group at once, in an order that all members
        share, as :meth:`connected` does.
        """
        options = None
        if ctas is not None and self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            options._timeout = self.timeout
        return self._new_axis(ranks, options=options)

    def host_group_of(self, ranks: Sequence[int]) -> Axis:
        """Make a connected group of `ranks` for tensors in host memory, which uses no GPU."""
        return self.connected(self._new_axis(ranks, "gloo"))

    def connected(self, axis: Axis) -> Axis:
        """Set up the communicator of `axis` by running collectives on it; return `axis`."""
        if axis.group is None:
            return axis
        on_nccl = axis.backend == "nccl"
        numbers = torch.zeros(axis.size, device=self.device if on_nccl else "cpu")
        dist.all_reduce(numbers, group=axis.group)
        if on_nccl:  # NCCL sets up each kind of collective at its first call
            all_gather(numbers, axis)
            reduce_scatter(numbers, axis)
            start_all_to_all(numbers, axis)[1]()
        return axis

    def _new_axis(
        self, ranks: Sequence[int], backend: str | None = None, *, options: Any = None
    ) -> Axis:
        """Make the axis of a group. A single rank gets no process group, as it has no peers."""
        if len(ranks) == 1:
            return Axis.alone(self.rank)
        backend = backend or self.backend
        group = self._new_group(ranks, backend, options)
        line = self.journal.counter(dist.distributed_c10d._world.pg_names[group], ranks)
        return Axis(len(ranks), list(ranks).index(self.rank), tuple(ranks), group, backend, line)

    def _new_group(self, ranks: Sequence[int], backend: str, options: Any) -> dist.ProcessGroup:
        """Make a group like ``dist.new_group``, but under a name on which its members agree.

        Members find each other by the name of the group. torch's default name counts all groups
        that a process has made, and that count may differ between members.
        """
        assert list(ranks) == sorted(ranks), f"{ranks} are not in ascending order"
        c10d = dist.distributed_c10d
        others = c10d._world.pg_group_ranks
        twins = sum(list(members) == list(ranks) for members in others.values())
        name: Any = group_name(ranks, twins)
        counter = self.journal.counter(f"meeting.{name}", ranks)
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
        group, _ = counter.wait(counter.count(), make)
        others[group] = {rank: index for index, rank in enumerate(ranks)}
        return group

    def holders_of(self, pp_indices: Sequence[int]) -> Axis:
        """Make a group of the pipeline ranks `pp_indices` with this rank's other coordinates; it
        communicates host tensors. If this rank's pipeline index is not in `pp_indices`, return an
        axis with only this rank."""
        if self.at.pp not in pp_indices:
            return Axis.alone(self.rank)
        ranks = (self.grid.rank_of(self.at._replace(pp=index)) for index in pp_indices)
        return self.host_group_of(sorted(ranks))

    @functools.cached_property
    def sequence(self) -> Axis:
        """Axis of the cp x tp ranks among which sequence parallelism splits the positions of the
        same sequences. Collective on first access."""
        at, grid = self.at, self.grid
        if grid.cp == 1 or (grid.tp == 1 and self.backend != "nccl"):
            return self.tp if grid.cp == 1 else self.cp
        first = grid.rank_of(at._replace(cp=0, tp=0))
        return self.connected(self.group_of(range(first, first + grid.cp * grid.tp)))

    @functools.cached_property
    def ep(self) -> Axis:
        """Axis of the ep x etp ranks over which all experts of a stage are split. Collective on
        first access."""
        return self.connected(self.group_of(self.grid.ep_peers(self.rank)))

    @functools.cached_property
    def ep_hops(self) -> tuple[Axis, Axis] | None:
        """Two axes for the two all-to-alls of hierarchical dispatch: :attr:`ep`'s ranks on this
        node, and its ranks with this rank's local index on every node. None if
        ``grid.ranks_per_node`` is None. Collective on first access."""
        if self.grid.ranks_per_node is None:
            return None
        inner, outer = map(self.group_of, self.grid.ep_hops(self.rank))
        return self.connected(inner), self.connected(outer)

    @functools.cached_property
    def etp(self) -> Axis:
        """Axis of the etp ranks over which the FFN hidden size of the same experts is split.
        Collective on first access."""
        size = self.grid.etp
        if self.grid.ep == 1:
            return self.ep
        first = self.rank - self.rank % size
        return self.connected(self.group_of(range(first, first + size)))

    def ordered_sum(
        self, vector: torch.Tensor, *axes: AxisName | Axis, largest: int = 0
    ) -> torch.Tensor:
        """Sum a 1-D host `vector` over each of the axes in turn, with :func:`sum_in_pairs`.

        The last `largest` values are not summed: the result has their maxima over the axes.

        The order of additions depends neither on the backend nor on positions in a buffer, unlike
        that of an all-reduce. So the result is bitwise equal on every rank and in every schedule.
        """
        for given in axes:
            axis = given if isinstance(given, Axis) else self._host[given]
            if axis.group is not None:
                vector = _combine(all_gather(vector, axis).view(axis.size, -1), largest)
        return vector

    def start_ordered_sum(
        self, vector: torch.Tensor, name: AxisName, *, largest: int = 0
    ) -> Callable[[], torch.Tensor]:
        """Start an :meth:`ordered_sum` over one axis. The returned function waits for the sum."""
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
        """Return device values as floats, after waiting for the device. All ranks call it."""
        self.journal.set_activity(text("adding up the totals"))
        numbers: list[float] = self._computed.wait(self._computed.count(), values.tolist)
        return numbers

    def gather_numbers(self, own: torch.Tensor) -> torch.Tensor:
        """Gather int64 values of all ranks: [n] in host memory -> [world, n]. Collective."""
        whole = own.unsqueeze(0)
        for name in reversed(AXES):
            whole = all_gather(whole, self._host[name])
        return whole

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective."""
        value = torch.tensor([float(flag)])
        for axis in self._host.values():
            if axis.group is not None:
                number = axis.line.count()
                largest = dist.ReduceOp.MAX
                work = dist.all_reduce(value, op=largest, group=axis.group, async_op=True)
                axis.line.wait(number, work.wait)
        return bool(value.item())

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.any(False)

    @functools.cached_property
    def store(self) -> dist.Store:
        """Key-value store of the whole job."""
        return dist.HashStore() if self.world == 1 else dist.distributed_c10d._get_default_store()

    def share(self, text: str) -> str:
        """Return on every rank the text that rank 0 passes. Collective."""
        if self.world == 1:
            return text
        key, number = self._next_key(), self._first.count()
        if self.rank == 0:
            self.store.set(key, text)
            return text

        def receive() -> bytes:
            await_keys(self.store, [key], self.timeout.total_seconds())
            value: bytes = self.store.get(key)
            return value

        return self._first.wait(number, receive).decode()

    def gather(self, text: str, name: AxisName) -> list[str]:
        """Return the texts of the axis `name`, by index, on its first rank; [] on other ranks."""
        axis = self._host[name]
        if axis.group is None:
            return [text]
        content = text.encode()
        lengths = all_gather(torch.tensor([len(content)]), axis).tolist()
        padded = bytearray(content.ljust(max(*lengths, 1)))  # an empty tensor cannot be sent
        rows = all_gather(torch.frombuffer(padded, dtype=torch.uint8), axis).view(axis.size, -1)
        if axis.index > 0:
            return []
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]

    def long_barrier(self, patience: datetime.timedelta) -> None:
        """Wait until every rank has called this method, for at most `patience`. The timeouts of the
        process groups do not apply."""
        if self.world == 1:
            return
        key = self._next_key()
        if self.store.add(f"{key}/arrived", 1) == self.world:
            self.store.set(key, "")
        await_keys(self.store, [key], patience.total_seconds())

    def agree(self, error: str | None) -> str | None:
        """Return on every rank the first `error` that a rank passes; None if every rank passes
        None. Collective."""
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
        """Set the timeouts of the existing groups to more than the longest suspension of a job.

        The clock of a group runs on while its process is suspended, and a timeout breaks the group
        for good. Monitors (:mod:`megapipe.watch`) find hangs instead.
        """
        for group in dist.distributed_c10d._world.pg_map:
            for device in group._device_types:
                with suppress(RuntimeError):  # no backend for the device, or one without timeouts
                    group._get_backend(device)._set_default_timeout(SUSPENDED)
        await_messages_for(SUSPENDED)

    def _next_key(self) -> str:
        self._exchanges += 1
        return f"megapipe/exchange/{self._exchanges}"
