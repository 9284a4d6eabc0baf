"""Whether a run fits its devices and how long a step takes, as text."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.moe.checks import why_as_many
from megapipe.layout.speeds import Speeds
from megapipe.plan.activation_memory import Activations, peak_activations
from megapipe.plan.communicators import beside_tensors
from megapipe.plan.memory import COPIES_KEPT, ModelMemory, model_memory
from megapipe.plan.pace import expected_step
from megapipe.plan.units import Units
from megapipe.schedule.timing.simulate import Timeline


def process_memory(
    units: Units, imbalance: Fraction | None = None
) -> list[tuple[ModelMemory, Activations]]:
    """The most that each process along the pipeline axis holds: one if ranks share a process.
    `imbalance` is that of :func:`peak_activations`."""
    config, layout = units.config, units.layout
    each = [peak_activations(units, rank, imbalance=imbalance) for rank in range(layout.pp)]
    if layout.in_process:
        whole = Activations(sum(a.device for a in each), sum(a.host for a in each))
        return [(model_memory(config, layout, 0), whole)]
    return [(model_memory(config, layout, rank), own) for rank, own in enumerate(each)]


class MemoryDemand(NamedTuple):
    """Bytes that processes hold on their devices, at the most."""

    totals: list[int]
    """Of each process along the pipeline axis."""
    parts: str
    """The parts of the largest of them, as text, with those that are elsewhere."""


def demand(units: Units, imbalance: Fraction | None = None) -> MemoryDemand:
    """Plan the memory of a resolved configuration; `imbalance` is that of
    :func:`peak_activations`."""
    config, layout = units.config, units.layout
    each = process_memory(units, imbalance)
    others = [0] * len(each)
    if layout.device == "cuda":
        others = [beside_tensors(config, layout, rank) for rank in range(len(each))]
    totals = [
        memory.total + activations.device + other
        for (memory, activations), other in zip(each, others, strict=True)
    ]
    most = max(totals)
    place = totals.index(most)
    memory, activations = each[place]
    parts = {
        "parameters": memory.parameters - memory.older_versions,
        "versions beside them": memory.older_versions,
        "gradients": memory.gradients - memory.second_gradients,
        "gradients that wait": memory.second_gradients,
        "optimizer state": memory.optimizer,
        "more during a step": memory.transient,
        "activations": activations.device,
        "CUDA and its libraries about": others[place],
        "activations in host memory": activations.host,
        "optimizer state elsewhere": memory.offloaded,
        "copy of a checkpoint in host memory": memory.checkpoint_part
        if config.checkpoint.background
        else 0,
        "copies of checkpoints in the node's memory": _copies(config, layout)
        * memory.checkpoint_part,
    }
    text = ", ".join(f"{what} {size_text(size)}" for what, size in parts.items() if size)
    return MemoryDemand(totals, text)


def _copies(config: Config, layout: Layout) -> int:
    """How many copies of its part of a checkpoint a process' node keeps in memory for it."""
    if not config.checkpoint.memory_every:
        return 0
    return COPIES_KEPT * (1 if layout.world <= config.parallel.per_node else 2)


def memory_lines(units: Units, speeds: Speeds, imbalance: Fraction | None = None) -> list[str]:
    """Lines of the plan: bytes of the process that holds most, of all, and whether they fit; and
    for how many rows of experts that is, if it can be others."""
    totals, text = demand(units, imbalance)
    most = max(totals)
    ranks = f" ({', '.join(map(size_text, totals))} by pipeline rank)" if len(totals) > 1 else ""
    return [
        f"memory        at most, per process: {text}",
        f"total         {size_text(most)}{ranks}; {_fits(most, speeds)}",
        *_row_lines(units, most, imbalance),
        *_compiled_lines(units),
    ]


def _compiled_lines(units: Units) -> Iterator[str]:
    """A line where the memory is more than that of a run."""
    if any(unit.compiled for unit in units.of(0)):
        yield "compiled      blocks are planned as they run uncompiled: a run takes this or less"


def _row_lines(units: Units, most: int, imbalance: Fraction | None) -> Iterator[str]:
    """A line about the rows of experts with which so many bytes are the most."""
    config = units.config
    if imbalance is None and config.model.moe.capacity is None:
        if not why_as_many(config):
            yield (
                "rows          those of experts chosen evenly; --imbalance 1.5 plans for a "
                "rank with 1.5 times as many"
            )
        return
    even = max(demand(units, Fraction(1)).totals)
    if imbalance is not None:
        rows = f"{float(imbalance):g} times the mean of all ranks, for the experts of one"
    elif even == most:
        return
    else:
        rows = "as many as experts have places for"
    yield f"rows          {rows}; with experts chosen evenly {size_text(even)} in total"


def _fits(most: int, speeds: Speeds) -> str:
    """Whether so many bytes fit on a device."""
    if speeds.memory_gb is None:
        return "set log.device_gb to know whether that fits"
    room = speeds.memory_gb * 1e9
    where = f"{speeds.memory_gb:g} GB" + (f" of {speeds.name}" if speeds.name else "")
    if most > room:
        return f"does NOT fit in {where}: {size_text(most - room)} too much"
    return f"fits in {where}, {size_text(room - most)} left"


def step_time_lines(units: Units, speeds: Speeds, timeline: Timeline) -> list[str]:
    """Lines of the plan: how long a step takes, and what was assumed."""
    config, layout = units.config, units.layout
    if speeds.tflops is None:
        return ["time          not known: set log.device (as in H100) or log.peak_tflops"]
    seconds, pause = expected_step(units, speeds, timeline)
    if layout.in_process:
        windows = (
            layout.async_schedule.windows_of(layout.run_schedule)
            if layout.async_schedule is not None
            else 1
        )
        seconds = float(sum(timeline.busy)) / windows
    train = config.train
    tokens = train.global_batch * train.sequence_length
    rate = tokens * layout.model.token_flops() / seconds / layout.world
    parallel = config.parallel
    links = [f"{speeds.efficiency:.0%} of {speeds.tflops:g} TFLOP/s (log.efficiency)"]
    if layout.world > 1:
        node = f"{parallel.node_gb_s:g} GB/s within nodes of {parallel.per_node}"
        links.append(f"{node} (parallel.node_gb_s)")
    if layout.world > parallel.per_node:
        links.append(f"{parallel.network_gb_s:g} GB/s between nodes (parallel.network_gb_s)")
    return [
        (
            f"time          {seconds:.3g} s per step, {tokens / seconds:,.0f} tokens per second, "
            f"MFU {rate / speeds.tflops / 1e12:.1%}, without the update"
        ),
        *(
            [f"pause         {pause:.3g} s more where the pipeline runs dry, as for a validation"]
            if layout.async_schedule is not None and not layout.in_process
            else []
        ),
        f"assumed       {f'{speeds.name}: ' if speeds.name else ''}{', '.join(links)}",
    ]


def size_text(count: float | Fraction) -> str:
    """Bytes with a unit of thousands."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def milliseconds(seconds: float) -> str:
    """A number of three digits, or whole."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"
