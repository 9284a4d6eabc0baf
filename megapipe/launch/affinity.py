"""Binds a process that drives a GPU to the CPU cores next to the GPU.

A host thread on the other socket launches kernels later and reaches pinned memory over the link
between the sockets.
"""

import os
from collections.abc import Set
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")


def bind_near(pci: str, devices: Path = DEVICES) -> Set[int]:
    """Bind this process, and the threads that it starts, to the CPU cores near a PCI device.

    `pci` is the device's address, such as ``0000:dc:00.0``. Return the numbers of the cores. The
    set is empty if nothing was done: the system does not know the cores, or a launcher, ``taskset``
    or a container has restricted them already.
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
    """Return the numbers of the CPU cores near a PCI device; none if the system does not know."""
    return _numbers(devices / pci / "local_cpulist")


def _online(devices: Path) -> Set[int]:
    """Return the numbers of all CPU cores of the machine."""
    return _numbers(devices.parents[2] / "devices" / "system" / "cpu" / "online")


def _numbers(path: Path) -> Set[int]:
    """Read a list of numbers such as ``0-3,8-11``; return an empty set if the file is missing."""
    try:
        ranges = path.read_text().strip().split(",")
    except OSError:
        return set()
    found: set[int] = set()
    for each in filter(None, ranges):
        first, _, last = each.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
