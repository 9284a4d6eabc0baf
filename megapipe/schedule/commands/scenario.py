"""Settings of a command: sizes for which schedules are built, and costs of their operations."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.commands.arguments import OF_STAGE, number, options_of
from megapipe.schedule.cost import Cost, Time, equal_buckets
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import accepts, aliases, names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.load import is_user_schedule, load, takes_option
from megapipe.schedule.memory import Amount, peak_weighted
from megapipe.schedule.placement import Placement, loop, m_shape, vee, wave
from megapipe.schedule.timing.opportunistic import deviate
from megapipe.schedule.timing.simulate import Timeline, simulate

Number = Fraction | int


@dataclass(frozen=True)
class Scenario:
    """Settings that all schedules of a command share."""

    ranks: int
    microbatches: int
    options: Mapping[str, Any]
    costs: Mapping[str, Number]
    stage_costs: Mapping[str, tuple[Number, ...]]
    bandwidth: Number | None
    jitter: Number
    seed: int
    activation_limit: Number | None
    freed: Fraction
    accounting: Literal["held", "weighted"]
    objective: Literal["makespan", "span"]
    placement: str | None
    policy: ReplicaPolicy
    buckets: int
    weight_versions: str | None = None
    """Name of the policy of a no-flush schedule; None: schedules that flush."""
    windows: int = 8
    extra_warmup: int | None = None
    prediction_horizon: str = "update"
    planned: Callable[[Placement], Cost] | None = None
    """Function that returns the costs of a model's stages on a placement."""

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Scenario":
        """Read the settings from the command line.

        Raises:
            ConfigError: a file of stage costs or a configuration that cannot be used, or
                --memory-accounting weighted without --freed-by-input-grad.
        """
        planned = None
        if given.config is not None:
            taken = sorted(set(given.cost) & {"F", "I", "W", "B", "R"})
            if given.stage_cost is not None or taken:
                other = f"--cost: {taken[0]} is" if taken else "--stage-cost: these times are"
                raise ConfigError(f"argument {other} in {given.config} already")
            if given.planner is None:
                raise ConfigError("argument --config: it works only with scripts/schedule.py")
            planned = given.planner(given.config)
        stage_costs = {} if given.stage_cost is None else read_stage_costs(given.stage_cost)
        if given.memory_accounting == "weighted" and given.freed_by_input_grad is None:
            raise ConfigError(
                "argument --memory-accounting: weighted needs --freed-by-input-grad, the share of "
                "an activation that the input gradient frees"
            )
        both = sorted(set(stage_costs) & set(given.cost))
        if both:
            raise ConfigError(f"argument --cost: {both[0]} is in {given.stage_cost} already")
        return cls(
            ranks=given.ranks,
            microbatches=given.microbatches,
            options=options_of(given),
            costs=given.cost,
            stage_costs=stage_costs,
            bandwidth=given.bandwidth,
            jitter=given.jitter,
            seed=given.seed,
            activation_limit=given.activation_limit,
            freed=Fraction(given.freed_by_input_grad or 0),
            accounting=given.memory_accounting,
            objective=given.objective,
            placement=given.placement,
            policy=ReplicaPolicy(given.zero, given.prefetch, given.chunked_loss),
            buckets=given.buckets,
            **_stream(given),
            planned=planned,
        )

    def cost(self, placement: Placement) -> Cost:
        """Return the costs of the stages of a placement, without jitter."""
        times = {name: self.costs[name] for name in OF_STAGE if name in self.costs}
        cost = Cost.full_rank(placement, **times, latency=self.costs.get("comm", 0))
        per_stage: dict[str, Any] = dict(self.stage_costs)
        if self.planned is not None:
            if placement.spanning:
                raise ConfigError(
                    f"argument --config: it has no times of a stage ({min(placement.spanning)}) "
                    "that spans all ranks; use --cost or --stage-cost"
                )
            model = self.planned(placement)
            per_stage = {kind: getattr(model, kind) for kind in ("F", "I", "W", "R")}
        return replace(
            cost,
            **per_stage,
            overlap_factor=self.costs.get("overlap", 1),
            bandwidth=self.bandwidth,
            message=1,
            buckets=equal_buckets(self.buckets, placement.stages),
        )

    def build(self, name: str, *, lenient: bool = False) -> tuple[Schedule, float]:
        """Build the schedule `name` with these settings; return it and the seconds this took.

        Args:
            lenient: ignore options that a registered schedule does not have.

        Raises:
            ScheduleError: a schedule that cannot be built, or has another placement than requested.
        """
        if self.weight_versions is not None:
            start = time.perf_counter()
            schedule = finite(self.stream(name), self.windows)
            return schedule, time.perf_counter() - start
        options = dict(self.options)
        if lenient and _registered(name):
            options = {what: value for what, value in options.items() if what in accepts(name)}
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches}
        hints: dict[str, Any] = {**sizes, **options, **self._memory(name)}
        start = time.perf_counter()
        schedule = load(name, **hints)
        costs_given = self.costs or self.stage_costs or self.bandwidth or self.planned
        if costs_given and takes_option(name, "cost"):  # stage costs depend on the placement
            cost = self.cost(schedule.placement)
            del schedule  # as large as the next one
            start = time.perf_counter()
            schedule = load(name, **hints, cost=cost)
        seconds = time.perf_counter() - start
        known = placement_names(schedule.placement)
        if self.placement not in (None, *known):
            raise ScheduleError(
                f"schedule {name}: its placement is {known[0]}, not {self.placement}"
            )
        return schedule, seconds

    def stream(self, name: str) -> AsyncSchedule:
        """Build the no-flush schedule with the order `name` and the policy `weight_versions`.

        Raises:
            ScheduleError: the schedule cannot be built.
        """
        assert self.weight_versions is not None
        return load_async_schedule(
            name,
            self.weight_versions,
            ranks=self.ranks,
            microbatches=self.microbatches,
            extra_warmup=self.extra_warmup or 0,
            prediction_horizon=self.prediction_horizon,
            ranks_per_stage=self.options.get("ranks_per_stage"),
        )

    def _memory(self, name: str) -> dict[str, Number | None]:
        """Return the options with which a schedule keeps to the memory limit; {} if the limit
        counts what an I frees and the schedule has no option `freed` for that."""
        if self.accounting == "held":
            return {"activation_limit": self.activation_limit}
        if is_user_schedule(name) or "freed" in accepts(name):
            return {"activation_limit": self.activation_limit, "freed": self.freed}
        return {}

    def counted(self, schedule: Schedule) -> tuple[Amount, ...]:
        """Return the peak activations of each rank, counted as --memory-accounting says."""
        return peak_weighted(schedule, self.freed if self.accounting == "weighted" else Fraction(0))

    def time(self, schedule: Schedule, *, window: int | None = None) -> Timeline:
        """Time a schedule. With `window`, a rank that waits may run one of its next `window`
        operations instead (:func:`~megapipe.schedule.timing.opportunistic.deviate`).

        Raises:
            ScheduleError: costs that do not fit the schedule, or are all zero.
        """
        cost = self.cost(schedule.placement)
        cost = replace(cost, jitter=float(self.jitter), seed=self.seed)
        if window is not None:
            return deviate(schedule, cost, window, self.policy)
        timeline = simulate(schedule, cost, self.policy)
        if not any(timeline.busy):
            raise ScheduleError(
                f"schedule {schedule.name}: it takes no time; give at least one cost above 0"
            )
        return timeline


def _stream(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for no-flush schedules; {} without --weight-versions.

    Raises:
        ConfigError: an argument that would have no effect.
    """
    weights = getattr(given, "weight_versions", None)
    if weights is None:
        for name in ("windows", "prediction_horizon"):
            if getattr(given, name, None) is not None:
                raise ConfigError(f"argument {_option(name)}: it needs --weight-versions")
        return {}
    for name, reason in (
        ("chunks", "the schedule decides the number of stages"),
        ("slices", "no-flush schedules run whole micro-batches"),
        ("microbatch_group_size", "no-flush schedules have no groups"),
        ("chimera_pairs", "no-flush schedules have no opposite pipelines"),
    ):
        if getattr(given, name) is not None:
            raise ConfigError(f"argument {_option(name)}: not with --weight-versions: {reason}")
    if given.prediction_horizon is not None and weights != "predict":
        raise ConfigError(
            f"argument --prediction-horizon: it is for --weight-versions predict, not {weights}"
        )
    return {
        "weight_versions": weights,
        "windows": given.windows or 8,
        "extra_warmup": given.extra_warmup,
        "prediction_horizon": given.prediction_horizon or "update",
    }


def _option(name: str) -> str:
    return "--sequence-slices" if name == "slices" else f"--{name.replace('_', '-')}"


def placement_names(placement: Placement) -> tuple[str, ...]:
    """Return the names of a placement, the most usual name first."""
    if placement.spanning:
        return ("m",) if placement == m_shape(placement.ranks) else ("own",)
    if len(placement.table) > 1:
        several = max(len(placement.stages_of(rank)) for rank in range(placement.ranks)) > 1
        return ("bidirectional" if several else "replicated",)
    ranks, chunks = placement.ranks, placement.stages // placement.ranks
    shapes = {"single": loop(ranks), "loop": loop(ranks, chunks) if chunks > 1 else None}
    shapes |= {"v": vee(ranks), "wave": wave(ranks, chunks // 2) if chunks > 1 else None}
    return tuple(name for name, shape in shapes.items() if shape == placement) or ("own",)


def read_stage_costs(path: Path) -> dict[str, tuple[Number, ...]]:
    """Read the times in a JSON list of {"F", "I", "W"} (and "B", "R", "reduce", "gather",
    "update"), one per virtual stage; return them by kind.

    Raises:
        ConfigError: the file cannot be read or is not such a list.
    """
    try:
        stages = json.loads(path.read_text(encoding="utf-8"), parse_float=str)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid JSON: {error}"
        raise ConfigError(f"{path}: {reason}") from None
    if not isinstance(stages, list) or not stages:
        raise ConfigError(f'{path}: write a list with {{"F": 1, "I": 1, "W": 1}} for each stage')
    rows = [_times(stage, f"{path}: stage {index}") for index, stage in enumerate(stages)]
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ConfigError(
                f"{path}: stage {index} has {', '.join(row)}, stage 0 has {', '.join(rows[0])}"
            )
    return {kind: tuple(row[kind] for row in rows) for kind in rows[0]}


def _times(stage: object, where: str) -> dict[str, Number]:
    if not isinstance(stage, dict):
        raise ConfigError(f'{where}: {stage!r} is not {{"F": 1, "I": 1, "W": 1}}')
    unknown = sorted(set(stage) - set(OF_STAGE))
    missing = [kind for kind in "FIW" if kind not in stage]
    if unknown or missing:
        what = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]} is missing"
        raise ConfigError(
            f"{where}: {what}; it has F, I and W, and may have B, R, reduce, gather and update"
        )
    result = {}
    for kind in sorted(stage, key=OF_STAGE.index):
        try:
            result[kind] = number(str(stage[kind]))
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{where}: {kind}: {error}") from None
    return result


def _registered(name: str) -> bool:
    return name in names() or name in aliases()


def json_number(value: Time) -> int | float:
    """Return a number as JSON writes it: an int if it is whole, else a float."""
    return int(value) if value == int(value) else float(value)
