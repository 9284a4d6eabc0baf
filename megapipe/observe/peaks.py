"""Peak speed of common GPUs, for the model FLOPs utilisation (MFU).

The numbers are *dense* bf16 tensor-core peaks with fp32 accumulation, in TFLOP/s of one device.
They come from NVIDIA's data sheets and architecture white papers (Volta, Ampere, Ada, Hopper,
Blackwell); where those give only the figure with 2:4 sparsity, it is halved. V100 has no bf16:
its figure is the one for fp16. A GeForce laptop part and a MIG slice carry the name of a larger
device and have no entry.
"""

import re

_PEAKS = (
    (r"GB300", 2500.0),
    (r"B300", 2250.0),
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"B100", 1750.0),
    (r"GH200", 989.4),
    (r"H200 NVL", 835.5),
    (r"H200", 989.4),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756.0),
    (r"H100", 989.4),
    (r"H800", 989.4),
    (r"H20", 148.0),
    (r"A100", 312.0),
    (r"A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10G", 70.0),
    (r"A10", 125.0),
    (r"L40S", 362.0),
    (r"L40", 181.0),
    (r"L4", 121.0),
    (r"RTX A6000", 154.8),
    (r"RTX 6000 Ada Generation", 364.2),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
    (r"V100-PCIE", 112.0),
    (r"V100", 125.0),
)


def peak(device_name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s of the device that torch calls ``device_name``, if known."""
    if re.search(r"\b(MIG|Laptop)\b|RTX \d+ D\b", device_name):
        return None
    for pattern, tflops in _PEAKS:
        if re.search(rf"\b{pattern}\b", device_name):
            return tflops
    return None
