"""The processors of a process that drives a GPU: those next to it.

A host thread on the other socket launches kernels later, and pinned memory that it makes is reached
over the link between the sockets.
"""

import os
from collections.abc import Set
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")


def bind_near(pci: str, devices: Path = DEVICES) -> Set[int]:
    """Keep this process, and the threads it makes, to the processors near a PCI device.

    `pci` is its address, such as ``0000:dc:00.0``. Returns the processors, none where nothing was
    done: where the system does not know which are near, or somebody has chosen some already
    (a launcher, ``taskset``, a container).
    """
    chosen = os.sched_getaffinity(0)
    if chosen != _online(devices):
        return set()
    found = chosen & near(pci, devices)
    if found and found != chosen:
        os.sched_setaffinity(0, found)
        return found
    return set()


def near(pci: str, devices: Path = DEVICES) -> Set[int]:
    """The processors near a PCI device; none where the system does not say."""
    return _numbers(devices / pci / "local_cpulist")


def _online(devices: Path) -> Set[int]:
    """All processors of the machine."""
    return _numbers(devices.parents[2] / "devices" / "system" / "cpu" / "online")


def _numbers(path: Path) -> Set[int]:
    """Numbers in a list such as ``0-3,8-11``; none where there is no such file."""
    try:
        ranges = path.read_text().strip().split(",")
    except OSError:
        return set()
    found: set[int] = set()
    for each in filter(None, ranges):
        first, _, last = each.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
