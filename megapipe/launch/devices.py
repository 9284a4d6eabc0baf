"""Which device each process computes on, and which library carries their messages.

NCCL needs a device per process. How many a process sees does not tell: under ``srun
--gpus-per-task=1`` each of eight processes sees one, number 0, and they are eight different ones;
and eight processes that see the same four share them. So the processes compare the identities of
their devices in the store, and the first one decides for all.
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
from megapipe.launch.place import LaunchInfo
from megapipe.util.lived import await_keys
from megapipe.words import count_noun

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

CPU = "cpu"
_log = logging.getLogger(__name__)


class DeviceKeys(Protocol):
    """Keys of a configuration on devices (``parallel.*``)."""

    @property
    def device(self) -> str:
        """auto, cpu or cuda."""

    @property
    def backend(self) -> str:
        """auto, gloo or nccl."""

    @property
    def timeout_s(self) -> float:
        """How long processes wait for each other."""


class Query(Protocol):
    """Questions of a process to its devices."""

    def count(self) -> int:
        """Devices that it sees."""

    def identity(self, index: int) -> str:
        """A name of device `index` that no other device of any host has."""


class Cuda:
    """The CUDA devices of this process."""

    def count(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> str:
        """The GPU's UUID, or for a part of a GPU (MIG) the UUID by which it was made visible."""
        import torch

        mig = mig_of(os.environ, index)
        if mig is not None:
            return mig
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        return f"GPU-{uuid}" if uuid else f"{socket.gethostname()} GPU {index}"


def pci_address(device: torch.device) -> str:
    """Where the system finds a CUDA device, such as ``0000:dc:00.0``; empty where torch does not
    tell."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_domain_id"):
        return ""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def mig_of(environ: Mapping[str, str], index: int) -> str | None:
    """The UUID of visible device `index` if it is a part of a GPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return name if name.startswith("MIG-") else None


@dataclass(frozen=True)
class DeviceReport:
    """The device that a process would compute on."""

    rank: int
    host: str
    device: str
    """Its identity; ``cpu`` where there is none."""


def choose_device(
    parallel: DeviceKeys, info: LaunchInfo, store: Store, query: Query | None = None
) -> tuple[torch.device, str]:
    """This process' device, and the backend of all groups.

    All processes call it with the same `parallel`. Raises :class:`ConfigError` or
    :class:`LaunchError`, the same on every rank, where the devices do not allow what it asks for.
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
    """The backend that rank 0 decides on, when it knows all devices."""
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
    """The backend for processes that have found these devices; with a warning where
    ``parallel.backend=auto`` is not NCCL though all have one.

    Raises :class:`ConfigError` where the devices do not allow what `parallel` asks for,
    :class:`LaunchError` where some processes have a device and others none.
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
                "megapipe: messages travel over gloo, through host memory, since NCCL needs a GPU "
                "per process, and %s; fewer processes would be faster",
                sharing,
            )
        return "gloo"
    return "nccl" if parallel.backend == "auto" else parallel.backend
