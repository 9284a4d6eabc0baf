"""Fits the factors of a plan's times (``plan.factors``) to runs: ``megapipe plan --calibrate``.

A planned time is a sum of parts in five categories. If every category takes a constant factor of
its assumed time, the measured times are linear in these factors. So the factors are found by
non-negative least squares over each kind of operation of each stage, and over whole steps. Where a
time is the maximum of two parts (device or host, kernels or an overlapped collective, the slowest
rank), its slope is that of the larger part, and the fit is repeated with the new factors.

Errors are relative. A factor that the runs hardly depend on stays near 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megapipe.config.config import Config
from megapipe.config.plan import PlanFactors
from megapipe.errors import ConfigError
from megapipe.layout.speeds import Speeds
from megapipe.plan.least_squares import nonnegative_least_squares
from megapipe.plan.measured_run import MeasuredRun
from megapipe.plan.step_time import expected_step, simulate_step, timed_cost
from megapipe.plan.unit import OPERATIONS, Operation
from megapipe.schedule.op_types import op_types

CATEGORIES = tuple(PlanFactors.model_fields)
LEAST, MOST = 0.5, 2.0
"""Range of factors that a fit may return: outside of it an assumption is wrong, not a constant."""
REMEDIES: Mapping[str, str] = {
    "gemm": "set plan.peak_tflops, or another plan.device",
    "attention": "the run may use other attention kernels than the plan",
    "bytes": "the run may use other kernels than the plan, or its device another memory",
    "host": "processes may share processors, or the machine was busy",
    "link": "set plan.intra_node_gb_s, plan.inter_node_gb_s and plan.link_latency_us, which "
    "megapipe doctor --links measures",
}
"""Advice if a factor is out of range."""
NOISE = 0.05
"""Expected relative error of a measured time."""
PRIOR = 1.0
"""Expected deviation of a factor from 1; it decides only where runs say little."""
ROUNDS, CLOSE = 20, 1e-4
"""Maximum number of fits, and the change of a factor at which they end."""
STEP = 1e-3
"""Relative change of a factor for slopes of planned times."""
SMALLEST = 1e-3
"""Smallest factor that a plan takes."""

Which = tuple[int, Operation] | None
"""A kind of operation of a stage, or None for a whole step."""


class TimeSample(NamedTuple):
    """A measured time and its planned times."""

    run: str
    which: Which
    measured: float
    """Seconds of an operation on a micro-batch, or of a step."""
    before: float
    """Planned seconds with factors of 1."""
    after: float
    """Planned seconds with the fitted factors."""


class Calibration(NamedTuple):
    """Fitted factors, and what they change."""

    factors: PlanFactors
    shares: Mapping[str, float]
    """Part of the planned steps' time that depends on each factor, at most 1 together."""
    samples: Sequence[TimeSample]


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit the factors to runs.

    Raises:
        ConfigError: runs of several models or devices, or a factor that is out of range; the text
            names its category.
    """
    _check_alike(runs)
    ones = np.ones(len(CATEGORIES))
    factors = ones
    for _ in range(ROUNDS):
        rows, targets = _equations(runs, factors)
        found = np.maximum(nonnegative_least_squares(rows, targets), SMALLEST)
        change, factors = float(np.abs(found - factors).max()), found
        if change < CLOSE:
            break
    shares = _shares(runs, factors)
    named = {name: float(f"{value:.3g}") for name, value in zip(CATEGORIES, factors, strict=True)}
    for name, value in named.items():
        if not LEAST <= value <= MOST:
            raise ConfigError(
                f"the factor of the category {name} would be {value:g}: expected {LEAST:g} to "
                f"{MOST:g}; {REMEDIES[name]}"
            )
    fitted = PlanFactors(**named)
    return Calibration(fitted, shares, list(_samples(runs, PlanFactors(), fitted)))


def _check_alike(runs: Sequence[MeasuredRun]) -> None:
    first, *others = runs
    config = first.units.config
    for other in others:
        own = other.units.config
        if _sizes(own) != _sizes(config):
            raise ConfigError(
                f"{other.folder}: the run has another model than {first.folder}: expected runs of "
                "one model"
            )
        if own.plan.device != config.plan.device:
            raise ConfigError(
                f"{other.folder}: plan.device={own.plan.device}, but {first.folder} has "
                f"{config.plan.device}: expected runs on one device"
            )


def _sizes(config: Config) -> dict[str, object]:
    """Return the model's keys, but for the one that follows from the sequence length."""
    return config.model.model_dump(exclude={"max_positions"})


def planned(run: MeasuredRun, factors: PlanFactors) -> dict[Which, float]:
    """Return the planned seconds of each measured kind of operation, and of a step."""
    section = run.units.config.plan.model_copy(update={"factors": factors})
    units = run.units.assuming(section)
    speeds, layout = Speeds.of(units.config), units.layout
    table = timed_cost(units, speeds).table(layout.stages)
    kinds = {operation: kind for kind, operation in OPERATIONS.items()}
    rebuilt = {
        (each.stage, OPERATIONS[each.kind])
        for rank in range(layout.pp)
        for each in op_types(layout.schedule, rank)
        if each.rebuilds
    }
    found: dict[Which, float] = {}
    for stage, operation in run.operations:
        found[stage, operation] = float(table[kinds[operation]][stage])
        if (stage, operation) in rebuilt:
            found[stage, operation] += float(table[kinds["R"]][stage])
    found[None] = expected_step(units, speeds, simulate_step(units, speeds)).step
    return found


def _named(factors: Iterable[float]) -> PlanFactors:
    return PlanFactors(**dict(zip(CATEGORIES, map(float, factors), strict=True)))


def _slopes(run: MeasuredRun, factors: np.ndarray) -> Mapping[Which, np.ndarray]:
    """Return the slope of each planned time by each factor, at `factors`.

    If all factors grow alike, so do all times: a time is the sum of its slopes times the factors.
    """
    at = planned(run, _named(factors))
    slopes = {which: np.zeros(len(factors)) for which in at}
    for number, factor in enumerate(factors):
        changed = factors.copy()
        changed[number] += STEP * factor
        for which, seconds in planned(run, _named(changed)).items():
            slopes[which][number] = (seconds - at[which]) / (STEP * factor)
    return slopes


def _equations(runs: Iterable[MeasuredRun], factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and targets of the least-squares problem, each divided by its expected error. An
    operation counts by its part of the measured operations."""
    rows, targets = list[np.ndarray](), list[float]()
    for run in runs:
        whole = sum(run.operations.values())
        for which, slopes in _slopes(run, factors).items():
            measured = run.step if which is None else run.operations[which]
            weight = 1.0 if which is None else (measured / whole) ** 0.5
            rows.append(slopes * weight / (NOISE * measured))
            targets.append(weight / NOISE)
    for number in range(len(factors)):
        rows.append(np.eye(len(factors))[number] / PRIOR)
        targets.append(1 / PRIOR)
    return np.array(rows), np.array(targets)


def _shares(runs: Sequence[MeasuredRun], factors: np.ndarray) -> dict[str, float]:
    """Return the mean part of a planned step's time that depends on each factor."""
    parts = [_slopes(run, factors)[None] * factors for run in runs]
    mean = sum(part / part.sum() for part in parts) / len(parts)
    return dict(zip(CATEGORIES, map(float, mean), strict=True))


def _samples(
    runs: Iterable[MeasuredRun], before: PlanFactors, after: PlanFactors
) -> Iterator[TimeSample]:
    for run in runs:
        old, new = planned(run, before), planned(run, after)
        for which in old:
            measured = run.step if which is None else run.operations[which]
            yield TimeSample(run.folder.name, which, measured, old[which], new[which])
