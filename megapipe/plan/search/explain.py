"""Where the time and the memory of a found layout go, and what would be faster if it fitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megapipe.layout.speeds import Speeds, stage_speeds
from megapipe.plan.kernel_time import KernelTime, Times
from megapipe.plan.memory_fit import DEVICE_PARTS, demand, milliseconds, size_text, step_figures
from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.layouts import LayoutChoice
from megapipe.plan.step_time import simulate_step
from megapipe.plan.unit import OPERATIONS, Kernel, Operation, Unit
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind
from megapipe.schedule.op_types import op_types
from megapipe.text import folded, table

COSTLIEST = 5
"""Number of kernels in the table."""


class TooLarge(NamedTuple):
    """A layout that does not fit, as far as is known without resolving it."""

    choice: LayoutChoice
    seconds: float
    """Lower bound of the seconds of a step."""
    bytes: float
    """Peak bytes, or a lower bound of them."""


class KernelShare(NamedTuple):
    """Equal calls of a kernel in a step on one rank."""

    kernel: Kernel
    calls: int
    seconds: float
    """Seconds of all calls."""


def explain(
    number: int,
    found: Sequence[Estimate],
    units: Units,
    speeds: Speeds,
    too_large: TooLarge | None,
) -> str:
    """Return the explanation of a found layout as text.

    Args:
        number: position of the layout in `found`, from 1.
        found: fastest layouts, the fastest first.
        units: costs of the layout's stages.
        speeds: speed of the device, which must be known.
        too_large: fastest layout that does not fit, if it could be faster than this one.
    """
    own = found[number - 1]
    rank, shares = step_shares(units, speeds)
    parts = [
        folded(f"layout {number}: {own.choice.text}"),
        "",
        *_share_lines(f"a step, on pipeline rank {rank}, which computes longest", shares),
        "",
        *_kernel_lines(units, speeds, rank),
        "",
        *_memory_lines(units, speeds),
        "",
        *map(folded, _other_lines(number, found, speeds, too_large)),
    ]
    return "\n".join(parts)


def step_shares(units: Units, speeds: Speeds) -> tuple[int, Mapping[str, float]]:
    """Return the pipeline rank that computes longest in a step, and the seconds of the step by what
    this rank does in them. They add up to the step."""
    layout, kernels = units.layout, KernelTime(speeds)
    timeline = simulate_step(units, speeds)
    figures = step_figures(units, speeds, timeline)
    assert figures is not None
    busy = [float(each) for each in timeline.busy]
    rank = busy.index(max(busy))
    causes: Mapping[str, Callable[[Times], float]] = {
        "GEMMs": lambda times: times.gemm,
        "attention": lambda times: times.attention,
        "kernels that only move bytes": lambda times: times.bytes,
        "host, while the device waits": lambda times: times.seconds - times.device,
    }

    speed_of = stage_speeds(units.config, layout.schedule.placement)

    def mean(stage: int, operation: Operation, cause: Callable[[Times], float]) -> float:
        def seconds(unit: Unit) -> float:
            return cause(kernels.of(unit.operations[operation], compiled=unit.compiled))

        return units.mean(stage, seconds) / speed_of[stage]

    operations = _operations(units, rank).items()
    found = {
        name: sum(count * mean(*of, cause) for of, count in operations)
        for name, cause in causes.items()
    }
    axes = [name for name in ("tp", "cp", "ep") if getattr(layout, name) > 1]
    if axes:
        found[f"collectives of {', '.join(axes)} that nothing overlaps"] = busy[rank] - sum(
            found.values()
        )
    gather, reduce = float(timeline.exposed_gather), float(timeline.exposed_reduce)
    if units.config.optimizer.post_validation:
        gather = 0.0  # ranks begin a step by themselves
    waits = figures.seconds - figures.update - busy[rank] - gather - reduce
    found["waits for other ranks: bubble, messages"] = waits
    found["gathers of weights before the first operation"] = gather
    found["reductions of gradients after the last operation"] = reduce
    found["update"] = figures.update
    return rank, found


def costliest_kernels(units: Units, speeds: Speeds, rank: int) -> list[KernelShare]:
    """Return the kernels of a step on pipeline rank `rank`, the one that takes most time first.
    Equal calls are one entry."""
    kernels, calls = KernelTime(speeds), Counter[Kernel]()
    for (stage, operation), count in _operations(units, rank).items():
        for unit in units.of(stage):
            for call in unit.operations[operation]:
                if isinstance(call, Kernel):
                    calls[call] += count
    found = [KernelShare(each, n, n * kernels.kernel(each)) for each, n in calls.items()]
    return sorted(found, key=lambda each: each.seconds, reverse=True)


def _operations(units: Units, rank: int) -> Counter[tuple[int, Operation]]:
    """Return the number of a rank's operations in a step, by stage. A B is an I and a W; one that
    recomputes its stage is an R, too."""
    layout = units.layout
    found: Counter[tuple[int, Operation]] = Counter()
    for what in op_types(layout.run_schedule, rank):
        kinds = [Kind.I, Kind.W] if what.kind == Kind.B else [what.kind]
        for kind in [*kinds, Kind.R] if what.rebuilds else kinds:
            found[what.stage, OPERATIONS[kind]] += 1
    return found


def _share_lines(title: str, shares: Mapping[str, float]) -> Iterator[str]:
    whole = sum(shares.values())
    rows = [[title, "ms", "share"]]
    rows += [
        [name, milliseconds(seconds), f"{seconds / whole:.1%}"]
        for name, seconds in shares.items()
        if abs(seconds) > whole / 10_000
    ]
    rows.append(["together", milliseconds(whole), ""])
    yield table(rows, left=1)


def _kernel_lines(units: Units, speeds: Speeds, rank: int) -> Iterator[str]:
    kernels, found = KernelTime(speeds), costliest_kernels(units, speeds, rank)
    peak = speeds.known.tflops * 1e12
    rows = [
        ["kernels that take most", "batch", "m", "n", "k", "calls", "ms", "of peak", "wave loss"]
    ]
    for kernel, calls, seconds in found[:COSTLIEST]:
        loss, sizes = kernels.wave_loss(kernel), kernel.product or ("", "", "")
        rows.append(
            [
                *(f"{kernel.name} {kernel.dtype}", str(kernel.batch), *map(str, sizes)),
                *(f"{calls:,}", milliseconds(seconds)),
                f"{kernel.flops * calls / seconds / peak:.0%}" if kernel.flops else "",
                "" if loss is None else f"{loss:.0%}",
            ]
        )
    yield table(rows, left=1)


def _memory_lines(units: Units, speeds: Speeds) -> Iterator[str]:
    found = demand(units)
    rank = found.processes.index(found.most)
    rows = [[f"memory of pipeline rank {rank}, which needs most", "size", "share"]]
    rows += [
        [DEVICE_PARTS[part], size_text(size), f"{size / found.most.total:.1%}"]
        for part, size in found.most.device.items()
        if size
    ]
    rows.append(["together", size_text(found.most.total), ""])
    if (room := speeds.plannable_bytes) is not None:
        rows.append(["left of what a plan may use", size_text(room - found.most.total), ""])
    yield table(rows, left=1)


def _other_lines(
    number: int, found: Sequence[Estimate], speeds: Speeds, too_large: TooLarge | None
) -> Iterator[str]:
    """Yield lines on the layouts next to this one, and on one that does not fit."""
    own = found[number - 1]
    for other in (number - 1, number + 1):
        if 0 < other <= len(found):
            each = found[other - 1]
            change = each.seconds / own.seconds - 1
            yield (
                f"layout {other} takes {change:+.1%} time and {size_text(each.bytes)}: "
                f"{each.choice.difference(own.choice)}"
            )
    room = speeds.plannable_bytes
    if too_large is not None and room is not None:
        yield (
            f"faster if it fitted, at least {too_large.seconds:.4g} s: "
            f"{too_large.choice.difference(own.choice)}; it needs at least "
            f"{size_text(too_large.bytes)}, {size_text(too_large.bytes - room)} too much"
        )
