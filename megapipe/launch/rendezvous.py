"""Lets the processes of a job meet in a key-value store, the rendezvous store.

Before any process group exists, the processes compare configuration and code in the store.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from megapipe.errors import ConfigError, DataError, LaunchError
from megapipe.launch.launch_info import LaunchInfo, spare_threads
from megapipe.launch.listen_address import (
    STORE,
    Report,
    is_here,
    is_loopback,
    listen,
    local_address,
    loopback_hint,
    own_address,
)
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.stores import open_tcp_store
from megapipe.text import ranges
from megapipe.util import heartbeat
from megapipe.util.lived import await_keys
from megapipe.util.processes import machine
from megapipe.util.timeouts import NoAnswer

if TYPE_CHECKING:
    from torch.distributed import Store

STARTED = "rank 0 started"
"""Key that rank 0 sets when it has read its configuration without an error."""
_VALUES = "values"
_LOOPBACK = re.compile(r"remote=\[(127\.[0-9.]+|::1)\]")
"""Pattern that finds a peer's loopback address in an error message of gloo."""
LEAST_S = 0.05
"""Minimum time limit of an attempt to connect, in seconds."""


class RendezvousError(LaunchError):
    """Error: the processes cannot meet in the rendezvous store."""


def open_store(
    info: LaunchInfo, timeout_s: float, report: Report = heartbeat.print_notice
) -> Store:
    """Open the rendezvous store. `report`: function that prints a line for the user. Raises
    :class:`RendezvousError`, whose text names host and port."""
    import torch  # noqa: F401, before a part of it: another thread may be loading it
    from torch.distributed import HashStore, PrefixStore

    if info.world == 1:
        return PrefixStore("megapipe", HashStore())
    if info.joined:
        return _store_of_group(info)
    if is_loopback(local_address(info.address)) and (problem := loopback_problem()) is not None:
        raise RendezvousError(problem)
    try:
        store = _tcp_store(info, timeout_s, report)
    except (RuntimeError, OSError) as error:
        busy = "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE
        reason = "the port is in use; set MASTER_PORT to a free one" if busy else str(error)
        raise RendezvousError(
            f"rendezvous at {info.address}:{info.port} failed: {reason.splitlines()[0]}"
        ) from None
    return of_ranks(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_group(info: LaunchInfo) -> LaunchInfo:
    """Return `info` for a job that uses the default process group that this process already has.

    Raises :class:`RendezvousError` unless the launcher's variables in `info` describe that group.
    """
    import torch.distributed as dist

    is_described = info.launched and (info.rank, info.world) == (
        dist.get_rank(),
        dist.get_world_size(),
    )
    if not is_described or (
        info.local_world < info.world and is_loopback(local_address(info.address))
    ):
        raise RendezvousError(
            "this process is already in a process group, and RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE and MASTER_ADDR do not describe it: set these variables, as "
            "torchrun and Ray do, or call outside of any group and of megapipe.spawn"
        )
    return replace(info, hosted=True, joined=True)


def _store_of_group(info: LaunchInfo) -> Store:
    """Return the job's part of the store of the default process group. Raises
    :class:`RendezvousError` for a second job in the group, which would find the first job's keys.
    """
    from torch.distributed import PrefixStore, distributed_c10d

    store = PrefixStore("megapipe", distributed_c10d._get_default_store())
    if store.add(f"joined by {info.rank}", 1) > 1:
        raise RendezvousError(
            "this process group has already had a megapipe run: make a new group for each run"
        )
    return store


def of_ranks(store: Store, attempt: str = "0") -> Store:
    """Return the part of a launcher's store that the ranks of one start of the job use. `attempt`:
    number of the start."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"megapipe/{attempt}", store)


def _tcp_store(info: LaunchInfo, timeout_s: float, report: Report) -> Store:
    """Open the store at the address in `info`. Rank 0 hosts it unless the launcher does."""
    listening = None
    if info.hosts:
        _retry_until_reachable(
            lambda _: socket.getaddrinfo(info.address, info.port), info, timeout_s, report
        )
        if info.is_listed and not is_here(info.address):
            raise RendezvousError(
                f"rank 0 is on {socket.gethostname()}, not on {info.address}, the first host "
                "of SLURM's list: set MASTER_ADDR to the host of rank 0"
            )
        if info.kubernetes:
            report(
                f"MASTER_ADDR={info.address} in a pod: {STORE} listens on all interfaces, "
                "because other pods may reach it through a service"
            )
        else:
            listening = listen(info.address, info.port, STORE, report)
    else:

        def connect(left: float) -> None:
            address = (local_address(info.address), info.port)
            socket.create_connection(address, timeout=left).close()

        hint = "" if info.hosted else "; look at the output of rank 0"
        hint += _hint(info)
        _retry_until_reachable(connect, info, timeout_s, report, hint)
    try:
        return open_tcp_store(
            local_address(info.address),
            info.port,
            timeout_s,
            world=info.world,
            hosts=info.hosts,
            listening=listening,
        )
    except NoAnswer as error:
        raise NoAnswer(f"{error}; set MASTER_PORT to another") from None


def _retry_until_reachable(
    look: Callable[[float], object],
    info: LaunchInfo,
    timeout_s: float,
    report: Report,
    hint: str = "",
) -> None:
    """Call `look` with the remaining seconds until it raises no OSError. Calls are repeated because
    a host's name can appear late in the name service, and a listener on the port can start late.
    The first process of a node prints a line at once if the name is unknown. Raises TimeoutError,
    with `hint` if nobody listens."""
    began, reported = time.monotonic(), info.local_rank > 0
    while True:
        try:
            look(max(timeout_s - (time.monotonic() - began), LEAST_S))
        except OSError as error:
            is_unknown = isinstance(error, socket.gaierror)
            if time.monotonic() - began > timeout_s:
                if is_unknown:
                    hint = "; set MASTER_ADDR to the host of rank 0"
                raise TimeoutError(
                    f"{error.strerror or error} for {timeout_s:.0f} s (parallel.timeout_s){hint}"
                ) from None
            if is_unknown and not reported:
                reported = True
                report(
                    f"this host cannot resolve {info.address}, the host of rank 0 "
                    f"(MASTER_ADDR); trying for {timeout_s:g} s (parallel.timeout_s), as a "
                    "name may appear late"
                )
            time.sleep(0.2)
        else:
            return


def place_on_host(store: Store, info: LaunchInfo, timeout_s: float) -> LaunchInfo:
    """Replace the guesses in `info`: this rank's index on its host, and the number of ranks there.
    Collective, through the store, unless `info` has no guesses. Rank 0 sets :data:`STARTED`.

    Raises :class:`LaunchError` if some ranks do not come within `timeout_s`.
    """
    from torch.distributed import DistStoreError

    if info.rank == 0:
        store.set(STARTED, "")
    if not info.guessed:
        return info
    store.set(f"host {info.rank}", machine())
    try:
        if info.rank == 0:
            names = [f"host {rank}" for rank in range(info.world)]
            await_keys(store, names, timeout_s)
            store.set("hosts", json.dumps([store.get(name).decode() for name in names]))
        await_keys(store, ["hosts"], timeout_s)
    except DistStoreError:
        raise _not_all(store, info, timeout_s, "host") from None
    hosts = json.loads(store.get("hosts"))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    found: dict[str, Any] = {"local_rank": here.index(info.rank), "local_world": len(here)}
    placed = replace(info, **{name: found[name] for name in info.guessed}, guessed=())
    if info.kubernetes and placed.local_world < placed.world:  # other hosts do not know the address
        with contextlib.suppress(OSError):  # no route: other hosts may still find the address
            placed = replace(placed, address=own_address(info.kubernetes, info.port))
    _spare_threads(placed.local_world)
    return placed


def _spare_threads(local_world: int) -> None:
    """Let this process compute in one thread if several processes share the host. In contrast to
    :func:`spare_threads`, torch may be imported already."""
    import torch

    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        spare_threads(local_world)
        torch.set_num_threads(1)


def compare_ranks(
    store: Store, info: LaunchInfo, values: Mapping[str, object], timeout_s: float
) -> None:
    """Check that `values` (configuration, code, versions; not nested) are the same on every rank.

    Raises :class:`LaunchError` on every rank; its text names fields, their values and the ranks.
    """
    from torch.distributed import DistStoreError

    if info.world == 1:
        return
    if info.rank == 0:
        store.set(_VALUES, json.dumps(dict(values), default=str))
    store.set(f"arrived {info.rank}", "")
    try:
        await_keys(store, [_VALUES], timeout_s)
        reference = json.loads(store.get(_VALUES))
        own = json.loads(json.dumps(dict(values), default=str))
        for key in sorted(reference.keys() | own.keys()):
            if reference.get(key) != own.get(key):
                difference = [key, reference.get(key), own.get(key), info.rank]
                number = store.add("differences", 1)
                store.set(f"difference {number}", json.dumps(difference))
        store.set(f"compared {info.rank}", "")
        if store.add("compared", 1) == info.world:
            store.set("all compared", "yes")
        await_keys(store, ["all compared"], timeout_s)
    except DistStoreError:
        raise _not_all(store, info, timeout_s, "arrived", "compared") from None
    numbers = range(1, store.add("differences", 0) + 1)
    if numbers:
        raise LaunchError(_describe([json.loads(store.get(f"difference {n}")) for n in numbers]))


def _not_all(store: Store, info: LaunchInfo, timeout_s: float, *prefixes: str) -> LaunchError:
    """Make the error that names the late ranks. Each rank sets one key per prefix, in the order
    of `prefixes`. The first prefix that some ranks lack decides: these ranks are late."""

    def without(prefix: str) -> list[int]:
        return [rank for rank in range(info.world) if not store.check([f"{prefix} {rank}"])]

    absent = next(filter(None, map(without, prefixes)), [])
    return LaunchError(
        f"{info.world - len(absent)} of {info.world} ranks arrived within {timeout_s:.0f} s "
        f"(parallel.timeout_s), and not rank{'s' * (len(absent) > 1)} {ranges(absent)}: look "
        f"at their output{_hint(info)}"
    )


def _hint(info: LaunchInfo) -> str:
    """Return a hint for the error if other hosts cannot reach rank 0's address. In Kubernetes there
    is no hint, because a master's pod always has such an address."""
    elsewhere = info.local_world < info.world and not info.kubernetes
    return loopback_hint(info.address) if elsewhere else ""


def _describe(differences: list[tuple[str, object, object, int]]) -> str:
    """Describe all differences in one line: field, rank 0's value, other values and their ranks."""
    fields: dict[str, tuple[object, dict[str, list[int]]]] = {}
    for key, expected, found, rank in differences:
        fields.setdefault(key, (expected, {}))[1].setdefault(repr(found), []).append(rank)
    parts = []
    for key, (expected, found) in sorted(fields.items()):
        others = ", ".join(
            f"{value} on rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
            for value, ranks in sorted(found.items())
        )
        parts.append(f"{key} is {expected!r} on rank 0 but {others}")
    return "the ranks disagree: " + "; ".join(parts)


T = TypeVar("T")


def first_on_host(store: Store, rank: int, name: str, act: Callable[[], T], timeout_s: float) -> T:
    """Call `act` in one process of each host first, then in the host's other processes: the first
    call fetches files that the others find.

    Return the result of `act`. A DataError in the first process is raised in all processes of the
    host. Raises :class:`LaunchError` if the first process takes longer than `timeout_s`.
    """
    key = f"{name} on {socket.gethostname()}"
    first = int(store.compare_set(key, "", str(rank)))
    if first != rank:
        other = f"rank {first}, the first on {socket.gethostname()},"
        problem = _of_other(store, f"{key} done", f"{name}: {other}", timeout_s)
        if problem:
            raise DataError(problem)
        return act()
    problem = ""
    try:
        return act()
    except DataError as error:
        problem = str(error)
        raise
    finally:
        store.set(f"{key} done", problem)


def of_rank_0(store: Store, rank: int, timeout_s: float, name: str, make: Callable[[], str]) -> str:
    """Return rank 0's result of `make`, a text, on all ranks. `name`: the text's name in errors.

    A ConfigError in `make` is raised on all ranks. Raises :class:`LaunchError` if `make` takes
    longer than `timeout_s`.
    """
    key = f"{name} of rank 0"
    if rank == 0:
        try:
            text = make()
        except ConfigError as error:
            store.set(key, json.dumps(["", str(error)]))
            raise
        store.set(key, json.dumps([text, ""]))
        return text
    text, problem = json.loads(_of_other(store, key, f"{name}: rank 0", timeout_s))
    if problem:
        raise ConfigError(problem)
    return str(text)


def _of_other(store: Store, key: str, who: str, timeout_s: float) -> str:
    """Wait for the text that another rank writes to the store under `key`. Raises
    :class:`LaunchError`, whose text begins with `who`, if the rank takes longer than `timeout_s`.
    """
    from torch.distributed import DistStoreError

    try:
        await_keys(store, [key], timeout_s)
    except DistStoreError:
        raise LaunchError(
            f"{who} did not finish it within parallel.timeout_s={timeout_s:.0f}"
        ) from None
    return store.get(key).decode()


@contextlib.contextmanager
def connecting(info: LaunchInfo) -> Iterator[None]:
    """Add a hint to a gloo error in the context if hosts look for each other at a loopback address.
    Debian gives each host's own name such an address."""
    try:
        yield
    except RuntimeError as error:
        found = _LOOPBACK.search(str(error))
        if found is not None and info.local_world < info.world:
            error.add_note(
                f"a host resolves its own name to {found.group(1)}, which other hosts cannot "
                "reach: set GLOO_SOCKET_IFNAME on all hosts to the interface of their network"
            )
        raise


def start_process_group(store: Store, info: LaunchInfo, backend: str, timeout_s: float) -> None:
    """Make the default process group, unless the caller has made it. Raises :class:`LaunchError` if
    the caller's group does not fit this job.

    The group is not bound to a device. If it were, torch would make each further NCCL group by
    splitting this one, and all ranks would have to take part in the split.
    """
    import torch.distributed as dist

    if info.joined:
        _check_group(backend)
        return
    try:
        with connecting(info):
            dist.init_process_group(
                backend,
                store=store,
                rank=info.rank,
                world_size=info.world,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
    except RuntimeError:  # from gloo, if this host's address is loopback
        if (problem := loopback_problem()) is not None:
            raise LaunchError(problem) from None
        raise


def _check_group(backend: str) -> None:
    """Raise LaunchError if the default group has another backend, or is bound to a device."""
    import torch.distributed as dist

    found, world = dist.get_backend(), dist.group.WORLD
    if found != backend:
        raise LaunchError(
            f"the existing process group has backend {found}, but this run needs {backend}: "
            f"make it with backend={backend}"
        )
    if world is not None and world.bound_device_id is not None:
        raise LaunchError(
            f"the existing process group is bound to {world.bound_device_id}, so that all "
            "ranks must join each new group: make it without device_id"
        )


def end_process_group(info: LaunchInfo) -> None:
    """Destroy all process groups, unless the caller of the job has made the default group."""
    import torch.distributed as dist

    if not info.joined:
        dist.destroy_process_group()
