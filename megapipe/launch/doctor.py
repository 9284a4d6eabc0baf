"""Reports what this machine offers a run: ``megapipe doctor``, or ``python scripts/doctor.py``.

The command prints a line for each thing that a run depends on and that differs between machines:
versions, devices, processors, limits, the host's network address. A line about a problem also says
what is expected. With ``--spin`` the command also finds out which host calls wait for a kernel that
spins on the GPU (:mod:`megapipe.launch.cuda_spin_probe`). With ``--links`` it measures the links
between the processes of a job instead (:mod:`megapipe.launch.link_test`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from megapipe.command_line import Parser, run_command
from megapipe.distributed.environment import ALLOCATOR, CONNECTIONS, LOADING, set_environment
from megapipe.errors import LaunchError
from megapipe.launch.affinity import near
from megapipe.launch.devices import Cuda, pci_address
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.open_files import USUAL
from megapipe.text import print_folded
from megapipe.util.paths import temporary_folder_problem

OLDEST_TORCH = (2, 10)
PACKAGES = ("numpy", "transformers", "tokenizers", "datasets", "safetensors", "wandb")


class Finding(NamedTuple):
    """Result of one check."""

    state: Literal["ok", "note", "wrong"]
    what: str
    text: str


def versions() -> Iterator[Finding]:
    """Check Python, torch and the optional packages of megapipe."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    text = _version("torch")
    if text is None:
        yield Finding("wrong", "torch", "not installed: expected pip install torch")
        return
    number = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        yield Finding("wrong", "torch", f"{text}: expected 2.10 or newer")
    else:
        yield Finding("ok", "torch", text)
    found = {name: _version(name) for name in PACKAGES}
    yield Finding("ok", "packages", ", ".join(f"{k} {v}" for k, v in found.items() if v))
    if missing := [name for name, version in found.items() if version is None]:
        yield Finding("note", "packages", f"not installed: {', '.join(missing)}")


def host(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check processors, memory, limits, network and environment variables of this host."""
    text = f"{os.cpu_count()}"
    if hasattr(os, "sched_getaffinity"):  # on Linux only
        text = f"{len(os.sched_getaffinity(0))} of {text} for this process"
    yield Finding("ok", "processors", text)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("ok", "memory", f"{pages / 2**30:.0f} GiB")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number of" if hard == resource.RLIM_INFINITY else max(hard - USUAL, 0)
    yield Finding("ok", "open files", f"{soft}, up to {hard}: room for {most} processes")
    if (problem := loopback_problem()) is not None:
        yield Finding("wrong", "loopback", problem)
    if (problem := temporary_folder_problem()) is not None:
        yield Finding("wrong", "temporary", problem)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding("note", "network", f"{name} has no address ({error}): {_INTERFACE}")
    else:
        if address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in environ:
            yield Finding("note", "network", f"{name} is {address} to itself: {_INTERFACE}")
        else:
            yield Finding("ok", "network", f"{name} is {address}")
    if environ.get(CONNECTIONS) == "1":
        text = f"{CONNECTIONS}=1 is refused with pipeline ranks: expected 32, or unset"
        yield Finding("note", "environment", text)


def heeded(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report environment variables that determine which host calls wait for a spinning kernel."""
    names = [name for name in (CONNECTIONS, LOADING, *ALLOCATOR) if name in environ]
    yield Finding("ok", "environment", ", ".join(f"{name}={environ[name]}" for name in names))


_INTERFACE = "for jobs on several hosts expected GLOO_SOCKET_IFNAME=INTERFACE"


def gpus() -> Iterator[Finding]:
    """Check the CUDA devices that this process sees."""
    if temporary_folder_problem() is not None:
        return  # torch cannot be loaded
    import torch

    count = Cuda().count()
    if not count:
        yield Finding("note", "gpu", "none: runs compute on the CPU and communicate over gloo")
        return
    for index in range(count):
        device = torch.device("cuda", index)
        found = torch.cuda.get_device_properties(device)
        address = pci_address(device)
        beside = len(near(address))
        yield Finding(
            "ok",
            f"gpu {index}",
            f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {Cuda().identity(index)}, "
            f"{address or 'no PCI address'}, {beside or 'no known'} local processors",
        )
    if torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("ok", "nccl", version)
    else:
        yield Finding("wrong", "nccl", "this torch has none: expected a build for CUDA")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parser() -> Parser:
    """Return the parser of the command."""
    top = Parser(
        description="Describe what this machine offers a run: versions, devices, limits.",
        epilog="Exit with code 4 if something is wrong.",
    )
    top.add_argument(
        "--spin",
        action="store_true",
        help="on a GPU: measure which calls wait for a spinning kernel (a posted receive "
        "spins), and how much such kernels slow a matrix product, with the environment "
        "variables of a run; takes a minute",
    )
    top.add_argument(
        "--links",
        type=Path,
        metavar="FILE",
        help="on each process of a launcher: measure the links between the processes instead, and "
        "write them as keys of the section plan, for megapipe plan --links",
    )
    top.set_defaults(run=_look)
    return top


def main(argv: Sequence[str]) -> int:
    """Print all findings. Return the exit code: 4 if something is wrong."""
    return run_command(parser(), argv)


def _look(given: argparse.Namespace) -> None:
    if given.links is not None:
        from megapipe.launch.link_test import measure_links

        measure_links(given.links)
        return
    looks: list[Callable[[], Iterator[Finding]]] = [versions, lambda: host(os.environ), gpus]
    if given.spin:  # set before torch is loaded, as in a run
        set_environment(os.environ, sends_messages=False, deterministic=False)
        looks.insert(0, lambda: heeded(os.environ))
    wrong = False
    for look in looks:
        for state, what, text in look():
            print_folded(f"{state:5}  {what:11}  {text}")
            wrong |= state == "wrong"
    if given.spin:
        from megapipe.launch import cuda_spin_probe

        for line in cuda_spin_probe.report():
            print(line, flush=True)
    if wrong:
        raise LaunchError("something is wrong: see above")
