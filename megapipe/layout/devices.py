"""Speed and memory of common GPUs: for the model FLOPs utilisation (MFU), and for plans.

The speeds are *dense* bf16 tensor-core peaks with fp32 accumulation, in TFLOP/s of one device.
They come from NVIDIA's data sheets and architecture white papers (Volta, Ampere, Ada, Hopper,
Blackwell); where those give only the figure with 2:4 sparsity, it is halved. V100 has no bf16:
its figure is the one for fp16. A GeForce laptop part and a MIG slice carry the name of a larger
device and have no entry. Memory that is not known, or not the same for all devices of a name, is
None.
"""

import re
from pathlib import Path
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.layout import DeviceKind


class Device(NamedTuple):
    """Known figures of a device."""

    tflops: float
    memory_gb: float | None
    """Billions of bytes: the GB of the data sheets. Devices have 2 to 7% more, room enough for
    CUDA's own data."""


_DEVICES = (
    (r"GB300", Device(2500.0, None)),
    (r"B300", Device(2250.0, None)),
    (r"GB200", Device(2500.0, 186.0)),
    (r"B200", Device(2250.0, 180.0)),
    (r"B100", Device(1750.0, None)),
    (r"GH200", Device(989.4, 96.0)),
    (r"H200 NVL", Device(835.5, 141.0)),
    (r"H200", Device(989.4, 141.0)),
    (r"H100 NVL", Device(835.5, 94.0)),
    (r"H100 PCIe", Device(756.0, 80.0)),
    (r"H100", Device(989.4, 80.0)),
    (r"H800", Device(989.4, 80.0)),
    (r"H20", Device(148.0, 96.0)),
    (r"A100", Device(312.0, None)),
    (r"A800", Device(312.0, None)),
    (r"A40", Device(149.7, 48.0)),
    (r"A30", Device(165.0, 24.0)),
    (r"A10G", Device(70.0, 24.0)),
    (r"A10", Device(125.0, 24.0)),
    (r"L40S", Device(362.0, 48.0)),
    (r"L40", Device(181.0, 48.0)),
    (r"L4", Device(121.0, 24.0)),
    (r"RTX A6000", Device(154.8, 48.0)),
    (r"RTX 6000 Ada Generation", Device(364.2, 48.0)),
    (r"RTX 5090", Device(209.5, 32.0)),
    (r"RTX 4090", Device(165.2, 24.0)),
    (r"RTX 3090", Device(71.0, 24.0)),
    (r"V100-PCIE", Device(112.0, None)),
    (r"V100", Device(125.0, None)),
)


def device(name: str) -> Device | None:
    """Known figures of the device that torch calls `name`, as in ``NVIDIA A100-SXM4-80GB``.

    A part of the name that identifies the device is enough. A memory size in the name is taken
    rather than the table's, but for GH200, where it is that of the CPU.
    """
    if re.search(r"\b(MIG|Laptop)\b|RTX \d+ D\b", name):
        return None
    for pattern, known in _DEVICES:
        if re.search(rf"\b{pattern}\b", name):
            said = re.search(r"\b(\d+) ?GB\b", name)
            if said is not None and pattern != "GH200":
                known = known._replace(memory_gb=float(said[1]))
            return known
    return None


def peak(name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s of the device that torch calls `name`, if known."""
    known = device(name)
    return None if known is None else known.tflops


def local_device(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Name of this machine's first GPU, as its driver says, without loading torch."""
    for path in sorted(folder.glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return found[1]
    return None


def device_kind(config: Config) -> DeviceKind:
    """The kind of device of a run, as far as can be said without torch: a GPU where ``log.device``
    names one or this machine has one."""
    if config.parallel.device != "auto":
        return config.parallel.device
    return "cuda" if config.log.device or local_device() else "cpu"
