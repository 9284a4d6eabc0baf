"""How a process finds its place in the job, meets its peers, and leaves.

A job starts under torchrun, under srun (its variables are enough), or as one plain process. The
processes meet in a key-value store; before any process group exists they compare their
configuration and code there.

What a user can mend is reported as exactly one line per job, see :func:`report`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megapipe.errors import LaunchError, MegapipeError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

PATIENCE_S = 10.0
"""How long a process other than rank 0 keeps an early error to itself: rank 0 has the same one as
a rule, prints it, and the launcher ends the job."""
FAILED = "megapipe/failed"


@dataclass(frozen=True)
class Place:
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


def find_place(environ: Mapping[str, str]) -> Place:
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
        return Place()
    place: dict[str, int] = {}
    for key, name in names.items():
        text = environ.get(name, default.get(name, ""))
        number = re.match(r"\d+", text)  # SLURM writes tasks per node as 8(x4)
        if number is None:
            raise LaunchError(f"environment variable {name}={text!r}: expected a number")
        place[key] = int(number.group())
    port = environ.get("MASTER_PORT") or str(
        20000 + int(environ.get("SLURM_JOB_ID", "9500")) % 10000
    )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"environment variable MASTER_PORT={port!r}: expected a port number")
    if not place["rank"] < place["world"]:
        raise LaunchError(f"rank {place['rank']} does not exist in a world of {place['world']}")
    return Place(**place, address=address, port=int(port), launched=True, hosted=hosted)


def first_host(nodelist: str) -> str:
    """First host of SLURM's compressed list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodelist)
    if match is None:
        return "127.0.0.1"
    prefix, ranges = match.groups()
    return prefix + (re.split(r"[-,]", ranges)[0] if ranges else "")


def open_store(place: Place, timeout_s: float) -> Store:
    """Meet at the rendezvous store. Raises :class:`LaunchError` naming host and port."""
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if place.world == 1:
        return PrefixStore("megapipe", HashStore())
    try:
        store = TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=place.rank == 0 and not place.hosted,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        busy = "EADDRINUSE" in str(error) or "address already in use" in str(error)
        reason = "the port is in use; set MASTER_PORT to a free one" if busy else str(error)
        raise LaunchError(
            f"rendezvous at {place.address}:{place.port} failed: {reason.splitlines()[0]}"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"megapipe/{attempt}", store)


def compare_ranks(
    store: Store, place: Place, values: Mapping[str, object], timeout_s: float
) -> None:
    """Check that every rank has the same flat `values` (configuration, code, versions).

    Raises :class:`LaunchError` on every rank, naming the fields, their values and the ranks.
    """
    if place.world == 1:
        return
    wait = datetime.timedelta(seconds=timeout_s)
    if place.rank == 0:
        store.set("values", json.dumps(dict(values), default=str))
    try:
        store.wait(["values"], wait)
        reference = json.loads(store.get("values"))
        own = json.loads(json.dumps(dict(values), default=str))
        for key in sorted(reference.keys() | own.keys()):
            if reference.get(key) != own.get(key):
                difference = [key, reference.get(key), own.get(key), place.rank]
                number = store.add("differences", 1)
                store.set(f"difference {number}", json.dumps(difference))
        if store.add("compared", 1) == place.world:
            store.set("all compared", "yes")
        store.wait(["all compared"], wait)
    except RuntimeError:
        arrived = store.add("compared", 0)
        raise LaunchError(
            f"{arrived} of {place.world} ranks arrived within {timeout_s:.0f} s "
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


def start_process_group(
    store: Store, place: Place, backend: str, timeout_s: float, device: torch.device
) -> None:
    """Make the default process group; with nccl eagerly, bound to this process' device."""
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )


def report(error: MegapipeError, place: Place, store: Store | None) -> int:
    """Print the error as one line, once per job; returns the exit code.

    Once there is a store, the first rank to claim the error prints it. Before that rank 0 prints
    at once and the others only if they outlive it.
    """
    first = place.rank == 0
    if store is not None:
        first = claim_failure(store, error.exit_code)
    elif not first:
        time.sleep(PATIENCE_S)
        first = True
    if first:
        text = " ".join(str(error).split())
        print(f"megapipe: error: {text}", file=sys.stderr, flush=True)
    if store is not None and place.rank == 0 and not place.hosted and place.world > 1:
        time.sleep(2.0)  # the peers' last look at the store that dies with this process
    return error.exit_code


def claim_failure(store: Store, exit_code: int) -> bool:
    """Whether this rank is the first to fail, and so the one to speak."""
    try:
        if store.add(FAILED + "/count", 1) == 1:
            store.set(FAILED, str(exit_code))
            return True
    except RuntimeError:  # the store went down with the rank that spoke
        pass
    return False


def failure_of_peer(store: Store, wait_s: float = 3.0) -> int | None:
    """The exit code that another rank failed with, if one has said so."""
    try:
        store.wait([FAILED], datetime.timedelta(seconds=wait_s))
        return int(store.get(FAILED))
    except RuntimeError:
        return None
