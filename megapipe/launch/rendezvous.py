"""How a process finds its place in the job and meets its peers.

A job starts under :mod:`megapipe.launch` or torchrun, under srun (its variables are enough), or as
one plain process. The processes meet in a key-value store; before any process group exists they
compare their configuration and code there.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megapipe.errors import DataError, LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store

ANSWER_S = 10.0
"""How long the store may take to answer once its port takes connections."""
VALUES = "values"


class RendezvousError(LaunchError):
    """The processes cannot meet in the store."""


@dataclass(frozen=True)
class LaunchInfo:
    """A process' place in the job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    launched: bool = False
    """Started by torchrun or srun."""
    hosted: bool = False
    """The launcher already runs the store at address:port (torchrun does)."""

    @property
    def hosts(self) -> bool:
        """Whether this process runs the store."""
        return self.rank == 0 and self.world > 1 and not self.hosted

    @property
    def ended_by_launcher(self) -> bool:
        """Whether the launcher ends all processes when one fails: torchrun does on its node."""
        return self.hosted and self.local_world == self.world


def find_launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's or SLURM's variables. Raises :class:`LaunchError` if they make no sense."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        names = {
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world": "LOCAL_WORLD_SIZE",
        }
        default = {"LOCAL_RANK": environ.get("RANK", ""), "LOCAL_WORLD_SIZE": ""}
        default["LOCAL_WORLD_SIZE"] = environ.get("WORLD_SIZE", "")
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = environ.get("MASTER_ADDR", "127.0.0.1")
    elif "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        names = {
            "rank": "SLURM_PROCID",
            "world": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world": "SLURM_STEP_TASKS_PER_NODE",
        }
        default, hosted = {}, False
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = environ.get("MASTER_ADDR") or first_host(nodes)
    else:
        return LaunchInfo()
    info: dict[str, int] = {}
    for key, name in names.items():
        text = environ.get(name, default.get(name, ""))
        number = re.match(r"\d+", text)  # SLURM writes tasks per node as 8(x4)
        if number is None:
            raise LaunchError(f"environment variable {name}={text!r}: expected a number")
        info[key] = int(number.group())
    job = environ.get("SLURM_JOB_ID", "9500")
    if not job.isdigit():
        raise LaunchError(f"environment variable SLURM_JOB_ID={job!r}: expected a number")
    port = environ.get("MASTER_PORT") or str(20000 + int(job) % 10000)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"environment variable MASTER_PORT={port!r}: expected a port number")
    if not info["rank"] < info["world"]:
        raise LaunchError(f"rank {info['rank']} does not exist in a world of {info['world']}")
    return LaunchInfo(**info, address=address, port=int(port), launched=True, hosted=hosted)


def first_host(nodelist: str) -> str:
    """First host of SLURM's compressed list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)  # up to a comma outside of brackets
    if match is None:
        return "127.0.0.1"
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", match.group())


def open_store(info: LaunchInfo, timeout_s: float) -> Store:
    """Meet at the rendezvous store. Raises :class:`RendezvousError` naming host and port."""
    from torch.distributed import HashStore, PrefixStore

    if info.world == 1:
        return PrefixStore("megapipe", HashStore())
    try:
        store = _tcp_store(info, timeout_s)
    except (RuntimeError, OSError) as error:
        busy = "EADDRINUSE" in str(error)
        reason = "the port is in use; set MASTER_PORT to a free one" if busy else str(error)
        raise RendezvousError(
            f"rendezvous at {info.address}:{info.port} failed: {reason.splitlines()[0]}"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"megapipe/{attempt}", store)


def _tcp_store(info: LaunchInfo, timeout_s: float) -> Store:
    """The store at address:port, hosted here or elsewhere.

    torch's client waits for ever for the answer of a port that something else listens on, so it
    waits in a thread that may be left behind.
    """
    from torch.distributed import TCPStore

    def connect() -> None:
        try:
            made.append(
                TCPStore(
                    info.address,
                    info.port,
                    info.world,
                    is_master=info.hosts,
                    timeout=datetime.timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                )
            )
        except (RuntimeError, ValueError) as error:
            failed.append(error)

    made: list[Store] = []
    failed: list[Exception] = []
    if not info.hosts:
        _await_port(info, timeout_s)
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if failed:
        raise failed[0]
    if not made:
        raise TimeoutError("what listens there is no rendezvous store; set MASTER_PORT to another")
    return made[0]


def _await_port(info: LaunchInfo, timeout_s: float) -> None:
    """Wait until something listens at address:port; raises OSError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((info.address, info.port), timeout=timeout_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or error
                raise TimeoutError(f"{reason} for {timeout_s:.0f} s (parallel.timeout_s)") from None
            time.sleep(0.2)
        else:
            return


def compare_ranks(
    store: Store, info: LaunchInfo, values: Mapping[str, object], timeout_s: float
) -> None:
    """Check that every rank has the same flat `values` (configuration, code, versions).

    Raises :class:`LaunchError` on every rank, naming the fields, their values and the ranks.
    """
    if info.world == 1:
        return
    wait = datetime.timedelta(seconds=timeout_s)
    if info.rank == 0:
        store.set(VALUES, json.dumps(dict(values), default=str))
    try:
        store.wait([VALUES], wait)
        reference = json.loads(store.get(VALUES))
        own = json.loads(json.dumps(dict(values), default=str))
        for key in sorted(reference.keys() | own.keys()):
            if reference.get(key) != own.get(key):
                difference = [key, reference.get(key), own.get(key), info.rank]
                number = store.add("differences", 1)
                store.set(f"difference {number}", json.dumps(difference))
        if store.add("compared", 1) == info.world:
            store.set("all compared", "yes")
        store.wait(["all compared"], wait)
    except RuntimeError:
        arrived = store.add("compared", 0)
        raise LaunchError(
            f"{arrived} of {info.world} ranks arrived within {timeout_s:.0f} s "
            "(parallel.timeout_s); look for one that failed to start"
        ) from None
    numbers = range(1, store.add("differences", 0) + 1)
    if numbers:
        raise LaunchError(_describe([json.loads(store.get(f"difference {n}")) for n in numbers]))


def _describe(differences: list[tuple[str, object, object, int]]) -> str:
    """One line for all differences: field, rank 0's value, the others' values and ranks."""
    fields: dict[str, tuple[object, dict[str, list[int]]]] = {}
    for key, expected, found, rank in differences:
        fields.setdefault(key, (expected, {}))[1].setdefault(repr(found), []).append(rank)
    parts = []
    for key, (expected, found) in sorted(fields.items()):
        others = ", ".join(
            f"{value} on rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}"
            for value, ranks in sorted(found.items())
        )
        parts.append(f"{key} is {expected!r} on rank 0 but {others}")
    return "the ranks disagree: " + "; ".join(parts)


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


T = TypeVar("T")


def first_on_host(store: Store, name: str, act: Callable[[], T], timeout_s: float) -> T:
    """Call `act` in one process of each host, then in the others, which find what it has fetched.

    Returns its result. A DataError of the first process is raised in all of the host;
    :class:`LaunchError` where that process takes longer than `timeout_s`.
    """
    key = f"{name} on {socket.gethostname()}"
    if store.add(key, 1) > 1:
        try:
            store.wait([f"{key} done"], datetime.timedelta(seconds=timeout_s))
        except RuntimeError:
            raise LaunchError(
                f"{name}: another process of {socket.gethostname()} took more than "
                f"{timeout_s:.0f} s for it (parallel.timeout_s)"
            ) from None
        problem = store.get(f"{key} done").decode()
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


def start_process_group(store: Store, info: LaunchInfo, backend: str, timeout_s: float) -> None:
    """Make the default process group.

    It is not bound to a device: torch would then make every further NCCL group by splitting this
    one, which all ranks of the world have to enter.
    """
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=store,
        rank=info.rank,
        world_size=info.world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def end_process_group() -> None:
    """Let go of all process groups."""
    import torch.distributed as dist

    dist.destroy_process_group()
