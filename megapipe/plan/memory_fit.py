"""Lines of the plan on memory and time: whether a run fits its devices, how long a step takes."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isinf
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.plan import PlanFactors
from megapipe.layout.layout import Layout
from megapipe.layout.moe.checks import why_as_many
from megapipe.layout.p2p import link_speed
from megapipe.layout.speeds import Speeds
from megapipe.plan.activation_memory import Activations, peak_activations
from megapipe.plan.communicators import beside_tensors
from megapipe.plan.memory import COPIES_KEPT, ModelMemory, model_memory
from megapipe.plan.step_time import expected_step
from megapipe.plan.units import Units
from megapipe.schedule.timing.simulate import Timeline


def process_memory(
    units: Units, imbalance: Fraction | None = None
) -> list[tuple[ModelMemory, Activations]]:
    """Return the peak memory of each process along the pipeline axis, or of the single process if
    pipeline ranks share one. `imbalance`: as for :func:`peak_activations`."""
    config, layout = units.config, units.layout
    each = [peak_activations(units, rank, imbalance=imbalance) for rank in range(layout.pp)]
    if layout.in_process:
        whole = Activations(sum(a.device for a in each), sum(a.host for a in each))
        return [(model_memory(config, layout, 0), whole)]
    return [(model_memory(config, layout, rank), own) for rank, own in enumerate(each)]


DEVICE_PARTS = {
    "weights": "parameters",
    "older_weights": "other weight versions",
    "gradients": "gradients",
    "deferred_gradients": "deferred gradients",
    "optimizer": "optimizer state",
    "transient": "more during a step",
    "activations": "activations",
    "libraries": "CUDA and its libraries about",
}
"""Parts of a process's memory on its device: names in JSON, and names in text."""
HOST_PARTS = {
    "activations": "activations in host memory",
    "optimizer": "offloaded optimizer state",
    "checkpoint_snapshot": "checkpoint snapshot in host memory",
    "in_memory_checkpoints": "in-memory checkpoints on the node",
}
"""Parts of a process's memory on its host and its disks: names in JSON, and names in text."""


class ProcessMemory(NamedTuple):
    """Peak bytes of a process."""

    device: Mapping[str, int]
    """Bytes of each of :data:`DEVICE_PARTS`."""
    host: Mapping[str, int]
    """Bytes of each of :data:`HOST_PARTS`."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def text(self) -> str:
        """Names and sizes of the memory parts that take more than 0 bytes."""
        both = ((self.device, DEVICE_PARTS), (self.host, HOST_PARTS))
        return ", ".join(
            f"{names[part]} {size_text(size)}"
            for sizes, names in both
            for part, size in sizes.items()
            if size
        )


class MemoryDemand(NamedTuple):
    """Peak bytes of each process along the pipeline axis, or of the single process that runs all
    pipeline ranks."""

    processes: list[ProcessMemory]

    @property
    def totals(self) -> list[int]:
        """Bytes of each process on its device."""
        return [each.total for each in self.processes]

    @property
    def most(self) -> ProcessMemory:
        """Process that needs most device memory; the first one in a tie."""
        return max(self.processes, key=lambda each: each.total)


def demand(units: Units, imbalance: Fraction | None = None) -> MemoryDemand:
    """Plan the memory of a resolved configuration. `imbalance`: as for :func:`peak_activations`."""
    config, layout = units.config, units.layout
    return MemoryDemand(
        [
            ProcessMemory(
                device={
                    "weights": memory.parameters - memory.older_versions,
                    "older_weights": memory.older_versions,
                    "gradients": memory.gradients - memory.second_gradients,
                    "deferred_gradients": memory.second_gradients,
                    "optimizer": memory.optimizer,
                    "transient": memory.transient,
                    "activations": activations.device,
                    "libraries": beside_tensors(config, layout, rank)
                    if layout.device == "cuda"
                    else 0,
                },
                host={
                    "activations": activations.host,
                    "optimizer": memory.offloaded,
                    "checkpoint_snapshot": memory.checkpoint_part * config.checkpoint.async_save,
                    "in_memory_checkpoints": _copies(config, layout) * memory.checkpoint_part,
                },
            )
            for rank, (memory, activations) in enumerate(process_memory(units, imbalance))
        ]
    )


def _copies(config: Config, layout: Layout) -> int:
    """Return the number of in-memory checkpoints that a node keeps per process on the node."""
    if not config.checkpoint.in_memory_every:
        return 0
    return COPIES_KEPT * (1 if layout.world <= config.parallel.ranks_per_node else 2)


def memory_lines(
    found: MemoryDemand, units: Units, speeds: Speeds, imbalance: Fraction | None = None
) -> list[str]:
    """Return the plan's lines on memory: bytes of the process that needs most, the total of each
    process, whether the totals fit, and the assumed number of expert rows. `found`: the planned
    memory (:func:`demand`)."""
    totals, most = found.totals, found.most.total
    ranks = f" ({', '.join(map(size_text, totals))} by pipeline rank)" if len(totals) > 1 else ""
    return [
        f"memory        at most, per process: {found.most.text}",
        f"total         {size_text(most)}{ranks}; {fit_text(most, speeds)}",
        *_row_lines(units, most, imbalance),
        *_compiled_lines(units),
    ]


def _compiled_lines(units: Units) -> Iterator[str]:
    """Yield a line if blocks are planned uncompiled, so that a run needs less memory."""
    if any(unit.compiled for unit in units.of(0)):
        yield "compiled      blocks are planned as if uncompiled: a run takes at most this"


def _row_lines(units: Units, most: int, imbalance: Fraction | None) -> Iterator[str]:
    """Yield a line about the number of expert rows with which `most` bytes were planned."""
    config = units.config
    if imbalance is None and config.model.moe.capacity_factor is None:
        if not why_as_many(config):
            yield (
                "rows          planned for evenly loaded experts; --imbalance 1.5 plans for a "
                "rank with 1.5 times as many"
            )
        return
    even = max(demand(units, Fraction(1)).totals)
    if imbalance is not None:
        rows = f"{float(imbalance):g} times the mean of all ranks, for the experts of one rank"
    elif even == most:
        return
    else:
        rows = "as many as the capacity of all experts"
    yield f"rows          {rows}; with evenly loaded experts {size_text(even)} in total"


def fits(most: int, speeds: Speeds) -> bool | None:
    """Whether `most` bytes and the margin fit on a device; None if its memory is unknown."""
    return None if speeds.plannable_bytes is None else most <= speeds.plannable_bytes


def fit_text(most: int, speeds: Speeds) -> str:
    """Describe whether `most` bytes fit on a device."""
    room = speeds.plannable_bytes
    if room is None:
        return "set plan.device_gb to see whether that fits"
    device = f"{speeds.memory_gb:g} GB" + (f" of {speeds.name}" if speeds.name else "")
    if speeds.margin_gb:
        device += f" with a margin of {speeds.margin_gb:.3g} GB"
    if not fits(most, speeds):
        return f"does NOT fit in {device}: {size_text(most - room)} too much"
    return f"fits in {device}, {size_text(room - most)} left"


class StepFigures(NamedTuple):
    """Planned times of a step, and the throughput that follows from them."""

    seconds: float
    """Time of a step with its update; with a no-flush schedule, of a steady-state update window."""
    update: float
    """Part of `seconds` in which the slowest rank updates its weights after all operations."""
    pause: float
    """With a no-flush schedule: extra seconds of each flush of the pipeline."""
    tokens_per_second: float
    mfu: float


def step_figures(units: Units, speeds: Speeds, timeline: Timeline) -> StepFigures | None:
    """Return the figures of a step, which is simulated in `timeline`; None if the device's speed is
    unknown."""
    config, layout = units.config, units.layout
    if speeds.tflops is None:
        return None
    seconds, update, pause = expected_step(units, speeds, timeline)
    if layout.in_process:
        stream = layout.async_schedule
        windows = 1 if stream is None else stream.windows_of(layout.run_schedule)
        seconds, pause = float(sum(timeline.busy)) / windows + update, 0.0
    rate = config.train.tokens_per_step / seconds
    flops = rate * layout.model.token_flops() / layout.world
    return StepFigures(seconds, update, pause, rate, flops / speeds.tflops / 1e12)


def step_time_lines(
    found: StepFigures | None, config: Config, layout: Layout, speeds: Speeds
) -> list[str]:
    """Return the plan's lines on the time of a step (:func:`step_figures`), and on the assumed
    speeds."""
    if found is None:
        return ["time          not known: set plan.device (as in H100) or plan.peak_tflops"]
    parallel, plan = config.parallel, config.plan
    links = [_of_device(speeds)]
    if layout.world > 1:
        within = link_speed(config, within=True)
        node = f"{within:g} GB/s within nodes of {parallel.ranks_per_node}"
        links.append(f"{node} (plan.intra_node_gb_s)")
    if layout.world > parallel.ranks_per_node:
        links.append(f"{plan.inter_node_gb_s:g} GB/s between nodes (plan.inter_node_gb_s)")
    lines = [
        (
            f"time          {found.seconds:.3g} s per step, {found.tokens_per_second:,.0f} tokens "
            f"per second, MFU {found.mfu:.1%}, {_of_update(found.update)}"
        )
    ]
    if layout.async_schedule is not None and not layout.in_process:
        flush = "for each flush of the pipeline, as for a validation"
        lines.append(f"pause         {found.pause:.3g} s more {flush}")
    name = f"{speeds.name}: " if speeds.name else ""
    return [*lines, f"assumed       {name}{', '.join(links)}"]


def _of_device(speeds: Speeds) -> str:
    """Describe the assumed speed of the device. The device must be known."""
    assert speeds.device is not None
    device, reaches = speeds.device, speeds.device.architecture
    slower, factors = speeds.factor, speeds.factors
    share = f"{reaches.gemm / slower / factors.gemm:.0%} of {device.tflops:g} TFLOP/s"
    keys = "plan.time_factor" if factors == PlanFactors() else "plan.time_factor, plan.factors"
    if isinf(device.tb_s):
        return f"{share} ({keys})"
    rate = device.tb_s * reaches.bytes / slower / factors.bytes
    return f"large GEMMs at {share}, {rate:.3g} TB/s ({keys})"


def _of_update(update: float) -> str:
    """Describe the part of a step in which weights are updated."""
    return f"{milliseconds(update)} ms for the update" if update else "without the update"


def size_text(count: float | Fraction) -> str:
    """Format a number of bytes with a decimal prefix (kB, MB, GB, TB) and three digits."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds with three digits, or as a whole number."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"
