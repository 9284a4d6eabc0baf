"""Speed and memory of common devices, for the model FLOPs utilisation (MFU) and for plans.

Peaks are *dense* bf16 tensor-core peaks with fp32 accumulation. Peaks, memory, bandwidths and
numbers of SMs come from data sheets and architecture white papers (NVIDIA: Volta, Ampere, Ada,
Hopper, Blackwell; AMD: CDNA 3). Peaks given only with 2:4 sparsity are halved. V100 has no bf16:
its peak is for fp16. GeForce laptop GPUs and MIG slices have no entry, as their names are those of
larger devices. What kernels reach of these figures is in an :class:`Architecture`, each number with
its source, or "assumed" if nothing better than an estimate was found.
"""

import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from megapipe.config.config import Config
from megapipe.layout.layout import DeviceKind


@dataclass(frozen=True)
class Architecture:
    """Shares of a device's peaks that kernels reach. By default only the peak is known: every
    kernel with FLOPs reaches 60% of it, and nothing else takes time."""

    gemm: float = 0.6
    """Share of the peak that a large GEMM reaches."""
    gemm_fill: int = 0
    """Elements of k that a tile of a GEMM takes in addition, to fill and drain its pipeline."""
    small_tile: float = 1.0
    """Speed of a GEMM with tiles of 128 x 128 relative to 256 x 128. Tiles of 128 x 64
    have the square of it."""
    forward: float = 0.6
    """Share of the peak that flash attention reaches in a forward with many heads."""
    backward: float = 0.6
    """Share of the peak that flash attention reaches in a backward with many heads."""
    longest_row: float = 0.0
    """Share of the longest block of attention scores that no other block's time hides."""
    bytes: float = inf
    """Share of the memory bandwidth that an elementwise kernel reaches; inf: no time."""
    kernel_us: float = 0.0
    """Microseconds that a kernel takes at least, on the device."""
    host_us: float = 0.0
    """Microseconds of the host per kernel, which it takes while the device computes."""
    host_computes: bool = False
    """Whether the host is the device, so that its time is added to that of the kernels."""
    fp32: float = 1.0
    """Peak of GEMMs in fp32 relative to bf16."""
    fp8: float = 1.0
    """Peak of GEMMs in fp8 relative to bf16."""


_VOLTA = Architecture(  # assumed, except: fp32 from the data sheet, 15.7 of 125 TFLOP/s
    gemm=0.8, gemm_fill=128, small_tile=0.8, forward=0.4, backward=0.35, longest_row=0.5,
    bytes=0.85, kernel_us=4, host_us=7, fp32=0.126,
)  # fmt: skip
_AMPERE = Architecture(
    gemm=0.86,  # 271 of 312 TFLOP/s, largest measured GEMM on an SXM (Stas Bekman, mamf-finder)
    gemm_fill=128,  # fitted, as small_tile, to half of 183 GEMMs on an A100 (SimuMax)
    small_tile=0.8,
    forward=0.60,  # 64 heads of 128, 4,096 positions (SimuMax, sdp_fwd)
    backward=0.50,  # as above (sdp_bwd)
    longest_row=0.5,  # as above, 4 to 64 heads: 0.3 to 0.8
    bytes=0.85,  # 1.7 of 2.04 TB/s; assumed from copies on an A100
    kernel_us=4,  # assumed
    host_us=7,  # assumed, eager PyTorch
    fp32=0.0625,  # data sheet: 19.5 of 312 TFLOP/s; torch does not use TF32 unless asked
)
_ADA = replace(_AMPERE, fp32=0.5, fp8=2.0)  # data sheets; the rest is assumed to be Ampere's
_HOPPER = replace(
    _AMPERE,
    gemm=0.76,  # 704 to 724 of 989 TFLOP/s at shapes of models (docs/benchmarks.md)
    forward=0.42,  # FlashAttention-2 on an H100: about 400 TFLOP/s (FlashAttention-3, 2407.08608)
    backward=0.36,  # assumed in the same ratio as on Ampere
    bytes=0.9,  # 3.0 of 3.35 TB/s (docs/benchmarks.md)
    fp32=0.068,  # data sheet: 67 of 989 TFLOP/s
    fp8=2.0,
)
_BLACKWELL = replace(
    _AMPERE,
    gemm=0.5,  # fitted, as the next two, to half of 514 GEMMs (SimuMax, b200_bf16): 0.46 to 0.65
    gemm_fill=256,
    small_tile=1.0,
    forward=0.45,  # 64 heads of 128, 4,096 positions (SimuMax, sdp_fwd: 0.44)
    backward=0.37,  # as above (sdp_bwd)
    bytes=0.67,  # SimuMax, bandwidth.default: 0.666 of 8 TB/s
    fp32=0.033,  # data sheet: 75 of 2,250 TFLOP/s
    fp8=2.0,
)
_CDNA3 = replace(  # assumed, except for the peaks of the data sheet
    _AMPERE, gemm=0.5, small_tile=0.9, forward=0.35, backward=0.25, bytes=0.75, fp32=0.125, fp8=2.0
)
_CPU = Architecture(  # measured with torch 2.13, one thread, on an AMD EPYC with AVX-512
    gemm=0.9,  # 0.10 of 0.11 TFLOP/s: m, n and k of 256 to 1,024
    forward=0.32,  # 0.035 TFLOP/s: 64 to 512 positions, heads of 64
    backward=0.30,  # 0.033 TFLOP/s, as above
    bytes=0.42,  # between sums in the cache (0.08 TB/s), and gates and transposed copies (0.005)
    host_us=8,  # assumed; a small sum takes 1, without autograd and modules
    host_computes=True,
)


@dataclass(frozen=True)
class Device:
    """Peak, memory and speeds of a device."""

    tflops: float
    """Dense bf16 peak in TFLOP/s; of a CPU the fp32 peak of one core."""
    memory_gb: float | None = None
    """Memory in units of 10^9 bytes, as in data sheets. Real devices have 2 to 7% more, which is
    enough for CUDA's own data."""
    units: int | None = None
    """Number of streaming multiprocessors or compute units; None: GEMMs are not cut into waves."""
    tb_s: float = inf
    """Bandwidth of the device's memory in TB/s."""
    link_gb_s: float | None = None
    """Bus bandwidth of a large collective within a node, in GB/s per device; None: unknown."""
    architecture: Architecture = Architecture()


CPU = "cpu"
"""Name of the device that a plan assumes for processes on CPUs."""

_PCIE = 20.0
"""GB/s of a collective over PCIe 4.0 x16, assumed."""
_A100 = Device(312.0, None, 108, 2.04, 230.0, _AMPERE)
"""Link: all-reduce of nccl-tests on eight A100 with NVLink 3, recalled."""
_H100 = Device(989.4, 80.0, 132, 3.35, 370.0, _HOPPER)
"""Link: all-reduce of nccl-tests on eight H100 with NVLink 4, recalled."""
_B200 = Device(2250.0, 180.0, 148, 8.0, 606.0, _BLACKWELL)
"""Link: all-gather of eight B200 (SimuMax, 0.67 of 900 GB/s)."""

_DEVICES = (
    (r"GB300", replace(_B200, tflops=2500.0, memory_gb=None)),
    (r"B300", replace(_B200, memory_gb=None)),
    (r"GB200", replace(_B200, tflops=2500.0, memory_gb=186.0)),
    (r"B200", _B200),
    (r"B100", replace(_B200, tflops=1750.0, memory_gb=None)),
    (r"GH200", replace(_H100, memory_gb=96.0, tb_s=4.0)),
    (r"H200 NVL", replace(_H100, tflops=835.5, memory_gb=141.0, tb_s=4.8)),
    (r"H200", replace(_H100, memory_gb=141.0, tb_s=4.8)),
    (r"H100 NVL", replace(_H100, tflops=835.5, memory_gb=94.0, tb_s=3.9)),
    (r"H100 PCIe", replace(_H100, tflops=756.0, units=114, tb_s=2.0, link_gb_s=_PCIE)),
    (r"H100", _H100),
    (r"H800", replace(_H100, link_gb_s=160.0)),  # assumed: NVLink of 400 instead of 900 GB/s
    (r"H20", replace(_H100, tflops=148.0, memory_gb=96.0, units=78, tb_s=4.0)),
    (r"A100", _A100),
    (r"A800", replace(_A100, link_gb_s=150.0)),  # assumed: NVLink of 400 instead of 600 GB/s
    (r"A40", Device(149.7, 48.0, 84, 0.696, _PCIE, _AMPERE)),
    (r"A30", Device(165.0, 24.0, 56, 0.933, _PCIE, _AMPERE)),
    (r"A10G", Device(70.0, 24.0, 80, 0.6, _PCIE, _AMPERE)),
    (r"A10", Device(125.0, 24.0, 72, 0.6, _PCIE, _AMPERE)),
    (r"L40S", Device(362.0, 48.0, 142, 0.864, _PCIE, _ADA)),
    (r"L40", Device(181.0, 48.0, 142, 0.864, _PCIE, _ADA)),
    (r"L4", Device(121.0, 24.0, 58, 0.3, _PCIE, _ADA)),
    (r"RTX A6000", Device(154.8, 48.0, 84, 0.768, _PCIE, _AMPERE)),
    (r"RTX 6000 Ada Generation", Device(364.2, 48.0, 142, 0.96, _PCIE, _ADA)),
    (r"RTX 5090", Device(209.5, 32.0, 170, 1.79, _PCIE, _ADA)),
    (r"RTX 4090", Device(165.2, 24.0, 128, 1.01, _PCIE, _ADA)),
    (r"RTX 3090", Device(71.0, 24.0, 82, 0.936, _PCIE, _AMPERE)),
    (r"V100-PCIE", Device(112.0, None, 80, 0.9, _PCIE, _VOLTA)),
    (r"V100", Device(125.0, None, 80, 0.9, 130.0, _VOLTA)),  # link assumed: NVLink 2
    (r"MI300X", Device(1307.4, 192.0, 304, 5.3, 310.0, _CDNA3)),  # link assumed
    (CPU, Device(0.11, None, None, 0.02, None, _CPU)),  # one core of a server, measured as _CPU
)


def device(name: str) -> Device | None:
    """Return the entry of a device, given torch's name for it, e.g. ``NVIDIA A100-SXM4-80GB``.

    A part of the name that identifies the device is enough. A memory size in the name replaces the
    entry's, except for GH200, in whose name it is the CPU's.
    """
    if re.search(r"\b(MIG|Laptop)\b|RTX \d+ D\b", name):
        return None
    for pattern, known in _DEVICES:
        if re.search(rf"\b{pattern}\b", name):
            memory = re.search(r"\b(\d+) ?GB\b", name)
            if memory is not None and pattern != "GH200":
                known = replace(known, memory_gb=float(memory[1]))
            return known
    return None


def peak(name: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s of the device that torch calls `name`; None:
    unknown."""
    known = device(name)
    return None if known is None else known.tflops


def local_device(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Return the driver's name of this machine's first GPU, without loading torch."""
    for path in sorted(folder.glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return found[1]
    return None


def device_kind(config: Config) -> DeviceKind:
    """Return a run's kind of device, as far as it is known without torch: a GPU if ``plan.device``
    names one or this machine has one."""
    if config.parallel.device != "auto":
        return config.parallel.device
    named = config.plan.device or local_device() or CPU
    return "cpu" if named == CPU else "cuda"
