"""Decides on which device each process computes, and which backend carries the messages.

NCCL needs a separate device for each process. The number of devices that a process sees does not
show whether devices are separate. Under ``srun --gpus-per-task=1`` each of eight processes sees one
device, number 0, and these are eight different GPUs. Eight processes that see the same four GPUs
share them. So the processes compare the identities of their devices in the store, and rank 0
decides for all.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megapipe.errors import ConfigError, LaunchError
from megapipe.launch.launch_info import LaunchInfo
from megapipe.text import count_noun
from megapipe.util.lived import await_keys

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

CPU = "cpu"
_log = logging.getLogger(__name__)


class DeviceKeys(Protocol):
    """Configuration keys about devices (``parallel.*``)."""

    @property
    def device(self) -> str:
        """Device to compute on: auto, cpu or cuda."""

    @property
    def backend(self) -> str:
        """Communication library: auto, gloo or nccl."""

    @property
    def timeout_s(self) -> float:
        """Seconds after which processes that wait for each other fail."""


class Query(Protocol):
    """Interface to the devices that a process sees."""

    def count(self) -> int:
        """Return the number of visible devices."""

    def identity(self, index: int) -> str:
        """Return a name of device `index` that is unique among the devices of all hosts."""


class Cuda:
    """The CUDA devices of this process."""

    def count(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> str:
        """Return the GPU's UUID, or that of the MIG instance in CUDA_VISIBLE_DEVICES."""
        import torch

        mig = mig_of(os.environ, index)
        if mig is not None:
            return mig
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        return f"GPU-{uuid}" if uuid else f"{socket.gethostname()} GPU {index}"


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a CUDA device, such as ``0000:dc:00.0``; "" if torch does not know
    it."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_domain_id"):
        return ""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def mig_of(environ: Mapping[str, str], index: int) -> str | None:
    """Return the UUID of visible device `index` if it is a MIG instance, else None."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return name if name.startswith("MIG-") else None


@dataclass(frozen=True)
class DeviceReport:
    """The device that a process would compute on, as it is reported to rank 0."""

    rank: int
    host: str
    device: str
    """The device's identity; ``cpu`` if there is no device."""


def choose_device(
    parallel: DeviceKeys, info: LaunchInfo, store: Store, query: Query | None = None
) -> tuple[torch.device, str]:
    """Return this process's device, and the backend of all groups.

    All processes call the function with the same `parallel`. Raises :class:`ConfigError` or
    :class:`LaunchError`, the same on every rank, if the devices do not allow what `parallel` asks
    for.
    """
    import torch

    if parallel.device == "cpu":
        return torch.device("cpu"), "gloo"
    query = query or Cuda()
    count = query.count()
    index = info.local_rank % count if count else 0
    device = query.identity(index) if count else CPU
    backend = _agree(parallel, info, store, DeviceReport(info.rank, socket.gethostname(), device))
    return torch.device("cuda", index) if count else torch.device("cpu"), backend


def _agree(parallel: DeviceKeys, info: LaunchInfo, store: Store, own: DeviceReport) -> str:
    """Return the backend that rank 0 chooses after all processes have reported their devices."""
    store.set(f"device {own.rank}", json.dumps(asdict(own)))
    if own.rank == 0:
        keys = [f"device {rank}" for rank in range(info.world)]
        await_keys(store, keys, parallel.timeout_s)
        found = [DeviceReport(**json.loads(store.get(key))) for key in keys]
        try:
            verdict = ["backend", decide(parallel, found)]
        except (ConfigError, LaunchError) as error:
            verdict = [type(error).__name__, str(error)]
        store.set("devices", json.dumps(verdict))
    await_keys(store, ["devices"], parallel.timeout_s)
    kind, text = json.loads(store.get("devices"))
    if kind == "backend":
        return str(text)
    raise (ConfigError if kind == "ConfigError" else LaunchError)(text)


def decide(parallel: DeviceKeys, found: Sequence[DeviceReport]) -> str:
    """Return the backend for processes that have found the devices `found`. Log a warning if
    ``parallel.backend=auto`` becomes gloo because processes share GPUs.

    Raises :class:`ConfigError` if the devices do not allow what `parallel` asks for,
    :class:`LaunchError` if some processes have a device and others do not.
    """
    without = [each.rank for each in found if each.device == CPU]
    if without and parallel.device == "cuda":
        on = "" if len(found) == 1 else f" on rank {without[0]}"
        raise ConfigError(
            f"parallel.device=cuda, but torch sees no CUDA device{on}; use auto or cpu"
        )
    if len(without) == len(found):
        if parallel.backend == "nccl":
            raise ConfigError("parallel.backend=nccl needs CUDA devices; use auto or gloo")
        return "gloo"
    if without:
        other = next(each for each in found if each.device != CPU)
        lacking = next(each for each in found if each.device == CPU)
        raise LaunchError(
            f"rank {lacking.rank} on {lacking.host} sees no CUDA device, rank {other.rank} on "
            f"{other.host} does; look at that host, or set parallel.device=cpu"
        )
    first: dict[str, DeviceReport] = {}
    for each in found:
        peer = first.setdefault(each.device, each)
        if peer is each:
            continue
        sharing = (
            f"ranks {peer.rank} and {each.rank} on {each.host} share {each.device}: {len(found)} "
            f"processes for {count_noun(len({one.device for one in found}), 'GPU')}"
        )
        if parallel.backend == "nccl":
            raise ConfigError(
                f"parallel.backend=nccl needs a GPU per process, and {sharing}; use gloo or fewer "
                "processes"
            )
        if parallel.backend == "auto":
            _log.warning(
                "megapipe: using gloo through host memory: NCCL needs one GPU per process, "
                "and %s. Fewer processes would be faster",
                sharing,
            )
        return "gloo"
    return "nccl" if parallel.backend == "auto" else parallel.backend
