"""How a process meets its peers: in a key-value store.

Before any process group exists they compare their configuration and code there.
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
from megapipe.launch.listening import (
    STORE,
    Tell,
    is_here,
    is_loopback,
    listen,
    local_address,
    loopback_hint,
    own_address,
)
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.place import LaunchInfo, spare_threads
from megapipe.launch.stores import open_tcp_store
from megapipe.util import heartbeat
from megapipe.util.answers import NoAnswer
from megapipe.util.lived import await_keys
from megapipe.util.processes import machine
from megapipe.words import ranges

if TYPE_CHECKING:
    from torch.distributed import Store

VALUES = "values"
_LOOPBACK = re.compile(r"remote=\[(127\.[0-9.]+|::1)\]")
"""The address of a peer in an error of gloo."""
LEAST_S = 0.05
"""The shortest time that an attempt to connect gets."""


class RendezvousError(LaunchError):
    """The processes cannot meet in the store."""


def open_store(info: LaunchInfo, timeout_s: float, tell: Tell = heartbeat.print_notice) -> Store:
    """Meet at the rendezvous store; `tell` is given lines for the user. Raises
    :class:`RendezvousError` naming host and port."""
    import torch  # noqa: F401, before a part of it: another thread may be loading it
    from torch.distributed import HashStore, PrefixStore

    if info.world == 1:
        return PrefixStore("megapipe", HashStore())
    if info.joined:
        return _store_of_group(info)
    if is_loopback(local_address(info.address)) and (problem := loopback_problem()) is not None:
        raise RendezvousError(problem)
    try:
        store = _tcp_store(info, timeout_s, tell)
    except (RuntimeError, OSError) as error:
        busy = "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE
        reason = "the port is in use; set MASTER_PORT to a free one" if busy else str(error)
        raise RendezvousError(
            f"rendezvous at {info.address}:{info.port} failed: {reason.splitlines()[0]}"
        ) from None
    return of_ranks(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_group(info: LaunchInfo) -> LaunchInfo:
    """Return the place of a process that is in a default process group, which a job is to use.

    Raises :class:`RendezvousError` unless the launcher's variables, as `info` has them, tell of
    that group.
    """
    import torch.distributed as dist

    told = info.launched and (info.rank, info.world) == (dist.get_rank(), dist.get_world_size())
    if not told or (info.local_world < info.world and is_loopback(local_address(info.address))):
        raise RendezvousError(
            "this process is in a process group already, of which RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE and MASTER_ADDR do not tell: expected these variables, as torchrun "
            "and Ray set them, or a call from outside of any group, and not within megapipe.spawn"
        )
    return replace(info, hosted=True, joined=True)


def _store_of_group(info: LaunchInfo) -> Store:
    """The job's part of the store of the default process group; raises :class:`RendezvousError` for
    a second job, which would find what the first one has left there."""
    from torch.distributed import PrefixStore, distributed_c10d

    store = PrefixStore("megapipe", distributed_c10d._get_default_store())
    if store.add(f"joined by {info.rank}", 1) > 1:
        raise RendezvousError(
            "this process group has had a run of megapipe's: expected a group for each run"
        )
    return store


def of_ranks(store: Store, attempt: str = "0") -> Store:
    """The part of a launcher's store that the ranks of an attempt have."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"megapipe/{attempt}", store)


def _tcp_store(info: LaunchInfo, timeout_s: float, tell: Tell) -> Store:
    """Open the store at address:port, hosted here or elsewhere."""
    listening = None
    if info.hosts:
        _until_there(lambda _: socket.getaddrinfo(info.address, info.port), info, timeout_s, tell)
        if info.is_listed and not is_here(info.address):
            raise RendezvousError(
                f"rank 0 is on {socket.gethostname()}, and not on {info.address}, the first host "
                "of SLURM's list: expected MASTER_ADDR to be set to the host of rank 0"
            )
        if info.kubernetes:
            tell(
                f"MASTER_ADDR={info.address} in a pod: {STORE} listens on all interfaces, as other "
                "pods may look for it through a service"
            )
        else:
            listening = listen(info.address, info.port, STORE, tell)
    else:

        def connect(left: float) -> None:
            place = (local_address(info.address), info.port)
            socket.create_connection(place, timeout=left).close()

        hint = "" if info.hosted else "; look whether rank 0 was started, and how it ended"
        hint += _hint(info)
        _until_there(connect, info, timeout_s, tell, hint)
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


def _until_there(
    look: Callable[[float], object],
    info: LaunchInfo,
    timeout_s: float,
    tell: Tell,
    hint: str = "",
) -> None:
    """Call `look` with the seconds that are left until it raises no OSError: a host may get its
    name, and a port its listener, while others wait for it. The first process of a node tells of an
    unknown name at once. Raises TimeoutError, with a `hint` where nobody listens."""
    began, told = time.monotonic(), info.local_rank > 0
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
            if is_unknown and not told:
                told = True
                tell(
                    f"this host knows no {info.address}, the host of rank 0 (MASTER_ADDR); looking "
                    f"for {timeout_s:g} s (parallel.timeout_s), as names may come late"
                )
            time.sleep(0.2)
        else:
            return


def place_on_host(store: Store, info: LaunchInfo, timeout_s: float) -> LaunchInfo:
    """Return `info` with what it has guessed so far: this rank's place among those of its host,
    which all tell each other. All ranks call it, unless none has guessed.

    Raises :class:`LaunchError` where some do not come within `timeout_s`.
    """
    from torch.distributed import DistStoreError

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
    if info.kubernetes and placed.local_world < placed.world:  # others find nothing at localhost
        with contextlib.suppress(OSError):  # no way there: others may still come
            placed = replace(placed, address=own_address(info.kubernetes, info.port))
    _spare_threads(placed.local_world)
    return placed


def _spare_threads(local_world: int) -> None:
    """Call :func:`megapipe.launch.place.spare_threads` once torch is loaded."""
    import torch

    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        spare_threads(local_world)
        torch.set_num_threads(1)


def compare_ranks(
    store: Store, info: LaunchInfo, values: Mapping[str, object], timeout_s: float
) -> None:
    """Check that every rank has the same flat `values` (configuration, code, versions).

    Raises :class:`LaunchError` on every rank, naming the fields, their values and the ranks.
    """
    from torch.distributed import DistStoreError

    if info.world == 1:
        return
    if info.rank == 0:
        store.set(VALUES, json.dumps(dict(values), default=str))
    store.set(f"arrived {info.rank}", "")
    try:
        await_keys(store, [VALUES], timeout_s)
        reference = json.loads(store.get(VALUES))
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


def _not_all(store: Store, info: LaunchInfo, timeout_s: float, *marks: str) -> LaunchError:
    """The error where some ranks have not left the first of these marks, or one that follows."""

    def without(mark: str) -> list[int]:
        return [rank for rank in range(info.world) if not store.check([f"{mark} {rank}"])]

    absent = next(filter(None, map(without, marks)), [])
    return LaunchError(
        f"{info.world - len(absent)} of {info.world} ranks arrived within {timeout_s:.0f} s "
        f"(parallel.timeout_s), and not rank{'s' * (len(absent) > 1)} {ranges(absent)}: look "
        "whether they were started, and how they ended"
        f"{_hint(info)}"
    )


def _hint(info: LaunchInfo) -> str:
    """Name the address where other hosts do not find the one of rank 0; a master's pod has such a
    one as a matter of course."""
    elsewhere = info.local_world < info.world and not info.kubernetes
    return loopback_hint(info.address) if elsewhere else ""


def _describe(differences: list[tuple[str, object, object, int]]) -> str:
    """One line for all differences: field, rank 0's value, the others' values and ranks."""
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
    """Call `act` in one process of each host, then in the others, which find what it has fetched.

    Returns its result. A DataError of the first process is raised in all of the host;
    :class:`LaunchError` where that process takes longer than `timeout_s`.
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
    """Return on all ranks the text that `make` returns on rank 0.

    A ConfigError of it is raised on all; :class:`LaunchError` where it takes longer than
    `timeout_s`.
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
    """Wait for the text that another rank puts under `key`. Raises :class:`LaunchError`, which
    begins with `who`, where that takes longer than `timeout_s`."""
    from torch.distributed import DistStoreError

    try:
        await_keys(store, [key], timeout_s)
    except DistStoreError:
        raise LaunchError(
            f"{who} took more than {timeout_s:.0f} s for it (parallel.timeout_s)"
        ) from None
    return store.get(key).decode()


@contextlib.contextmanager
def connecting(info: LaunchInfo) -> Iterator[None]:
    """A block in which processes connect: an error of gloo gets a note where hosts look for each
    other at a loopback address, as Debian gives one to each host's own name."""
    try:
        yield
    except RuntimeError as error:
        found = _LOOPBACK.search(str(error))
        if found is not None and info.local_world < info.world:
            error.add_note(
                f"a host's own name is {found.group(1)} on it, where no other host gets: set "
                "GLOO_SOCKET_IFNAME on all hosts to the interface of their network"
            )
        raise


def start_process_group(store: Store, info: LaunchInfo, backend: str, timeout_s: float) -> None:
    """Make the default process group, unless the caller has; raises :class:`LaunchError` where that
    is none for this job.

    It is not bound to a device: torch would then make every further NCCL group by splitting this
    one, which all ranks of the world have to enter.
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
    except RuntimeError:  # gloo's, where the address of this host is that of loopback
        if (problem := loopback_problem()) is not None:
            raise LaunchError(problem) from None
        raise


def _check_group(backend: str) -> None:
    """Refuse a default process group of another backend, or one that is bound to a device."""
    import torch.distributed as dist

    found, world = dist.get_backend(), dist.group.WORLD
    if found != backend:
        raise LaunchError(
            f"the process group that is there is one of {found}, and this run needs {backend}: "
            f"expected one that is made with backend={backend}"
        )
    if world is not None and world.bound_device_id is not None:
        raise LaunchError(
            f"the process group that is there is bound to {world.bound_device_id}, so that all "
            "ranks have to enter each further group: expected one that is made without device_id"
        )


def end_process_group(info: LaunchInfo) -> None:
    """Let go of all process groups, unless the caller has made the default one."""
    import torch.distributed as dist

    if not info.joined:
        dist.destroy_process_group()
