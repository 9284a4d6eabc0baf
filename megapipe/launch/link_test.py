"""The links between the processes of a job, measured: ``megapipe doctor --links FILE``.

Each pair of processes sends messages back and forth while the others wait. A message of a few bytes
gives the latency, a large one the bandwidth. The file has the keys of the section `plan` that
describe the links: medians of the pairs within nodes and between them, and the pairs that are much
slower (``plan.links``).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from megapipe.config.parallel import ParallelConfig
from megapipe.config.plan_file import write_plan_file
from megapipe.errors import LaunchError
from megapipe.launch import devices, rendezvous
from megapipe.launch.launch_info import find_launch_info

if TYPE_CHECKING:
    import torch

SMALL, LARGE = 4, 2**24
"""Bytes of the messages that give latency and bandwidth."""
ROUNDS = 9
"""Number of times that each message is sent; the median counts. One more warms up."""
SLOW = 0.7
"""A link is listed if its bandwidth is below this part of the median of its kind."""
TIMEOUT_S = 600.0


class Link(NamedTuple):
    """A measured link between two processes."""

    first: int
    second: int
    latency: float
    """Seconds of a message of a few bytes, one way."""
    gb_s: float
    """Bandwidth in GB/s."""


def measure_links(file: Path) -> None:
    """Measure all links of the job that a launcher has started, and write `file` on rank 0.

    Raises:
        LaunchError: a single process, or processes that do not meet.
        ConfigError: the file cannot be written.
    """
    info = find_launch_info(os.environ)
    if info.world == 1:
        raise LaunchError(
            "--links measures links between processes: expected several, as in megapipe launch "
            f"--nproc 2 -m megapipe doctor --links {file}"
        )
    store = rendezvous.open_store(info, TIMEOUT_S)
    info = rendezvous.place_on_host(store, info, TIMEOUT_S)
    device, backend = devices.choose_device(ParallelConfig(), info, store)
    rendezvous.start_process_group(store, info, backend, TIMEOUT_S)
    try:
        found = [
            Link(first, second, *times)
            for first, second in combinations(range(info.world), 2)
            if (times := _between(first, second, info.rank, device)) is not None
        ]
        store.set(f"links of {info.rank}", repr([tuple(link) for link in found]))
        if info.rank == 0:
            names = [f"links of {rank}" for rank in range(info.world)]
            store.wait(names, datetime.timedelta(seconds=TIMEOUT_S))
            every = [Link(*each) for name in names for each in _read(store.get(name))]
            keys = plan_keys(every, info.local_world)
            write_plan_file(file, f"measured by megapipe doctor --links, over {backend}", keys)
            print("\n".join(_lines(keys, file)))
    finally:
        rendezvous.end_process_group(info)


def _read(text: bytes) -> Sequence[tuple[Any, ...]]:
    import ast

    found: list[tuple[Any, ...]] = ast.literal_eval(text.decode())
    return found


def _between(
    first: int, second: int, rank: int, device: torch.device
) -> tuple[float, float] | None:
    """Measure a link; return its latency and GB/s on the first process, and None on the others."""
    import torch.distributed as dist

    dist.barrier()
    if rank not in (first, second):
        return None
    peer = second if rank == first else first
    times = [_one_way(size, peer, device, begins=rank == first) for size in (SMALL, LARGE)]
    if rank != first:
        return None
    latency, whole = times
    return latency, LARGE / 1e9 / max(whole - latency, 1e-9)


def _one_way(size: int, peer: int, device: torch.device, *, begins: bool) -> float:
    """Return the median seconds of half a round trip of `size` bytes. Both processes call it."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(size, dtype=torch.uint8, device=device)
    turns: list[Callable[[], object]] = [
        lambda: dist.send(message, peer),
        lambda: dist.recv(message, peer),
    ]
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for turn in turns if begins else turns[::-1]:
            turn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / 2)
    return median(times[1:])


def plan_keys(links: Iterable[Link], ranks_per_node: int) -> Mapping[str, Any]:
    """Return the keys of the section `plan` that describe the links."""
    by_kind: dict[bool, list[Link]] = {True: [], False: []}
    for link in links:
        within = link.first // ranks_per_node == link.second // ranks_per_node
        by_kind[within].append(link)
    keys: dict[str, Any] = {}
    slow: dict[str, float] = {}
    for within, name in ((True, "intra_node_gb_s"), (False, "inter_node_gb_s")):
        if own := by_kind[within]:
            usual = median(link.gb_s for link in own)
            keys[name] = _rounded(usual)
            slow |= {
                f"{link.first}-{link.second}": _rounded(link.gb_s)
                for link in own
                if link.gb_s < SLOW * usual
            }
    every = [link.latency for own in by_kind.values() for link in own]
    keys["link_latency_us"] = _rounded(1e6 * median(every))
    return {**keys, "links": slow} if slow else keys


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _lines(keys: Mapping[str, Any], file: Path) -> Iterable[str]:
    for name, value in keys.items():
        pairs = value if isinstance(value, dict) else {"": value}
        yield from (f"plan.{name}{'.' * bool(pair)}{pair}={rate:g}" for pair, rate in pairs.items())
    yield f"written to {file}: use it with megapipe plan --links {file}"
