"""How long a kernel or a collective takes on a device.

A kernel takes a fixed time, plus the time of its FLOPs or of its bytes, whichever is longer. A GEMM
is cut into tiles, which the device computes in whole waves. Attention runs at a share of the
peak, and is longer if it has few heads, since the device waits for its longest block. A collective
runs in a ring: it takes a latency for each hop, and the time of the bytes that a rank sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from math import ceil
from typing import Literal, NamedTuple

from megapipe.config.config import Config
from megapipe.layout.p2p import in_nodes, link_latency, speed
from megapipe.layout.speeds import Speeds
from megapipe.plan.unit import Kernel, Operation, Transfer, Unit

TILES = ((256, 128), (128, 256), (128, 128), (128, 64))
"""Rows and columns of a GEMM's tiles, as in cuBLAS."""
LARGE_TILE, MEDIUM_TILE = 256 * 128, 128 * 128
ALIGNED = 16
"""Bytes to which rows have to be aligned for the tensor cores' widest loads (NVIDIA, Matrix
Multiplication Background User's Guide, section Tensor Core Requirements)."""
BATCHED = 0.5
"""Share of the fp32 peak that batched GEMMs reach if rows are not aligned, without tensor cores. It
is the difference of BLOOM's runs with heads of 108 and of 104 or 144 columns (35 to 40% of a step,
about 10 TFLOP/s on an A100; bigscience, chronicles-prequel)."""
GROUPED = 0.8
"""Speed of a grouped GEMM relative to one GEMM (SimuMax, A100: 0.63 to 0.71 of the peak, not
0.78)."""
ATTENTION_ROWS = 128
"""Rows of queries that one block of flash attention computes."""
CUDNN, EFFICIENT = 1.5, 0.6
"""Speeds of cuDNN's and of memory-efficient attention relative to flash attention; assumed."""
KernelKind = Literal["gemm", "attention", "bytes"]
"""Category of a kernel: with FLOPs of products, of attention, or without FLOPs."""
HOP_US = 5.0
"""Microseconds that each rank after the second adds to a collective between nodes; assumed."""


class Times(NamedTuple):
    """Seconds of an operation by cause: GEMMs, attention, memory traffic, host."""

    gemm: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0
    """Seconds of kernels that only move bytes: norms, sums, copies."""
    host: float = 0.0
    """Seconds that the host needs to start the operation's kernels."""
    host_computes: bool = False
    """Whether the host is the device, and computes nothing while it starts kernels."""

    @property
    def device(self) -> float:
        """Seconds of the operation's kernels on the device."""
        return self.gemm + self.attention + self.bytes

    @property
    def seconds(self) -> float:
        """Seconds of the operation: the host starts kernels while the device computes, unless it is
        the device."""
        if self.host_computes:
            return self.device + self.host
        return max(self.device, self.host)


class KernelTime:
    """Times of kernels on a device. Raises :class:`ConfigError` if the device's peak is unknown."""

    def __init__(self, speeds: Speeds) -> None:
        self.device, self.factor, self.factors = speeds.known, speeds.factor, speeds.factors
        self.reaches = self.device.architecture
        self._known: dict[int, tuple[Kernel, float]] = {}

    def of(self, calls: Iterable[Kernel | Transfer], *, compiled: bool = False) -> Times:
        """Return the times of the kernels among an operation's `calls`. `compiled`: inductor fuses
        neighbouring kernels that only move bytes."""
        kernels = [call for call in calls if isinstance(call, Kernel)]
        found: dict[KernelKind, float] = {"gemm": 0.0, "attention": 0.0, "bytes": 0.0}
        count = 0
        for kind, group in groupby(kernels, key=_kind):
            times = [self.kernel(kernel) for kernel in group]
            joined = compiled and kind == "bytes"
            found[kind] += max(times) if joined else sum(times)
            count += 1 if joined else len(times)
        host = self.factor * self.factors.host * count * self.reaches.host_us / 1e6
        return Times(**found, host=host, host_computes=self.reaches.host_computes)

    def seconds(self, operation: Operation, unit: Unit) -> float:
        """Return the seconds of an operation's kernels."""
        return self.of(unit.operations.get(operation, ()), compiled=unit.compiled).seconds

    def moved(self, size: float) -> float:
        """Return the seconds in which a kernel reads and writes `size` bytes."""
        return self.factor * self.factors.bytes * self._moved(size)

    def _moved(self, size: float) -> float:
        return size / (self.device.tb_s * 1e12 * self.reaches.bytes)

    def kernel(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel on the device. Equal layers share a kernel object, so its
        time is computed once."""
        if (known := self._known.get(id(kernel))) is None:
            known = self._known[id(kernel)] = kernel, self._seconds(kernel)
        return known[1]

    def _seconds(self, kernel: Kernel) -> float:
        computed, kind = 0.0, _kind(kernel)
        if kind == "attention":
            computed = self._attention(kernel)
        elif kernel.product is not None:
            computed = self._product(*kernel.product, batch=kernel.batch, dtype=kernel.dtype)
            computed /= GROUPED if kernel.name == "_grouped_mm" and self.device.units else 1.0
        elif kernel.flops:
            computed = self._flops(kernel.flops, kernel.dtype)
        moved = self._moved(kernel.read + kernel.written)
        factor = self.factor * getattr(self.factors, kind)
        return float(factor * (max(computed, moved) + self.reaches.kernel_us / 1e6))

    def _peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of GEMMs in the number type `dtype`."""
        relative = {"float32": self.reaches.fp32, "float64": self.reaches.fp32 / 2}
        if dtype.startswith("float8"):
            relative[dtype] = self.reaches.fp8
        return self.device.tflops * 1e12 * relative.get(dtype, 1.0)

    def _flops(self, flops: float, dtype: str = "bfloat16") -> float:
        """Return the seconds that `flops` take at the rate of large GEMMs."""
        return flops / (self._peak(dtype) * self.reaches.gemm)

    def _product(self, m: int, n: int, k: int, *, batch: int = 1, dtype: str = "bfloat16") -> float:
        """Return the seconds of `batch` GEMMs [m, k] @ [k, n]."""
        units = self.device.units
        if units is None:
            return self._flops(2 * batch * m * n * k, dtype)
        computed, speed = self._computed(m, n, batch, units)
        aligned = _alignment(n, k, dtype)
        if batch > 1 and aligned < 1:
            aligned = min(aligned, BATCHED * self.reaches.fp32)
        flops = 2 * computed * (k + self.reaches.gemm_fill)
        return flops / (self._peak(dtype) * self.reaches.gemm * speed * aligned)

    def wave_loss(self, kernel: Kernel) -> float | None:
        """Return the share of a GEMM's time that large tiles which cover its result exactly would
        save: of the last wave, of tiles beyond the edges, of small tiles. None for other kernels,
        and if the device's number of units is unknown."""
        if self.device.units is None or kernel.product is None or _kind(kernel) != "gemm":
            return None
        m, n, _ = kernel.product
        computed, speed = self._computed(m, n, kernel.batch, self.device.units)
        return 1 - kernel.batch * m * n * speed / computed

    def _computed(self, m: int, n: int, batch: int, units: int) -> tuple[float, float]:
        """Choose the fastest tiles of `batch` results [m, n]. Return the number of elements that
        whole waves of tiles compute, and their speed relative to large tiles."""
        choices = (
            (
                ceil(batch * ceil(m / rows) * ceil(n / columns) / units) * units * rows * columns,
                self._tile_speed(rows * columns),
            )
            for rows, columns in TILES
        )
        return min(choices, key=lambda each: each[0] / each[1])

    def _tile_speed(self, area: int) -> float:
        if area >= LARGE_TILE:
            return 1.0
        return self.reaches.small_tile if area >= MEDIUM_TILE else self.reaches.small_tile**2

    def _attention(self, kernel: Kernel) -> float:
        share = self._share(backward="backward" in kernel.name)
        if "cudnn" in kernel.name:
            share *= CUDNN
        elif "efficient" in kernel.name:
            share *= EFFICIENT
        flops = float(kernel.flops)
        if self.device.units is not None and kernel.product is not None:
            queries, keys, width = kernel.product
            flops += _masked(kernel, queries, keys, width)
            longest = _every_score(kernel.name, min(ATTENTION_ROWS, queries), keys, width)
            flops += self.reaches.longest_row * longest * self.device.units
        return flops / (self._peak(kernel.dtype) * min(share, 1.0))

    def _share(self, *, backward: bool) -> float:
        return self.reaches.backward if backward else self.reaches.forward

    def attention(self, flops: float, *, backward: bool) -> float:
        """Return the seconds that `flops` of attention take if there are many heads."""
        rate = self.device.tflops * 1e12 * self._share(backward=backward)
        return self.factor * self.factors.attention * flops / rate


def _every_score(name: str, queries: int, keys: int, width: int) -> int:
    """Return the FLOPs of a head if no score is masked: two products in a forward, five in a
    backward."""
    return (10 if "backward" in name else 4) * queries * keys * width


def _masked(kernel: Kernel, queries: int, keys: int, width: int) -> float:
    """Return the FLOPs of masked scores that are computed nevertheless: tiles on the diagonal of a
    causal mask are computed whole."""
    causal = kernel.flops < 0.75 * kernel.batch * _every_score(kernel.name, queries, keys, width)
    return kernel.flops * ATTENTION_ROWS / keys if causal else 0.0


def _kind(kernel: Kernel) -> KernelKind:
    if "attention" in kernel.name:
        return "attention"
    return "gemm" if kernel.flops else "bytes"


@cache
def _alignment(n: int, k: int, dtype: str) -> float:
    """Return the speed of a GEMM relative to one whose rows are aligned."""
    size = int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8
    bytes_ = min((length * size) & -(length * size) for length in (n, k))
    return min(1.0, bytes_ / ALIGNED)


def transfer_seconds(config: Config, transfer: Transfer) -> float:
    """Return the seconds of a collective, or of a message, over the slowest of its links."""
    return ring_seconds(config, float(transfer.wire), transfer.members, transfer.span)


def ring_seconds(config: Config, size: float, members: int, span: int) -> float:
    """Return the seconds of a collective in a ring. `size`: bytes that a rank sends; `span`: number
    of ranks from the group's first to its last."""
    if members == 1:
        return 0.0
    latency = link_latency(config)
    if latency and not in_nodes(config, span):
        latency += HOP_US / 1e6 * config.plan.factors.link * (members - 2)
    return size / (1e9 * speed(config, span, members)) + latency
