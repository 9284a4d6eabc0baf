"""The work of a search: measuring a shape, planning a layout. Processes of a pool can do it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.config.pipeline import PipelineConfig
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import known_speeds
from megapipe.plan.cache import Cache
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand, fits
from megapipe.plan.search.estimate import Estimate, ShapeCost, estimate
from megapipe.plan.search.layouts import LayoutChoice, Shape, with_keys
from megapipe.plan.units import Units


class LayoutJob(NamedTuple):
    """A layout to plan."""

    choice: LayoutChoice
    cost: ShapeCost
    """Costs of its shape."""
    bound: float
    """Lower bound of the seconds of a step."""
    limit: float
    """Seconds at which the layout is of no interest."""


class LayoutPlan(NamedTuple):
    """Figures of a layout's plan, as far as it was planned."""

    bound: float | None
    """Lower bound of the seconds of a step; None: it cannot be planned."""
    bytes: int | None = None
    """Peak bytes of the process that needs most; None: not planned, as the bound was too high."""
    estimate: Estimate | None = None
    """None: not planned, or it does not fit."""
    refusal: str | None = None
    """Why it cannot be planned."""

    def is_open(self, limit: float) -> bool:
        """Whether the layout must be planned to know if a step takes less than `limit` seconds."""
        return self.bound is not None and self.bytes is None and self.bound < limit


class Planner(NamedTuple):
    """Planner of the layouts of one configuration."""

    config: Config
    """Configuration; keys that the search varies have any value."""
    gpus: int
    cache: Cache

    def perform(self, job: Shape | LayoutJob) -> ShapeCost | str | LayoutPlan:
        """Measure a shape, or plan a layout."""
        with contextlib.redirect_stderr(io.StringIO()):  # for the line that shows the progress
            return self.measure(job) if isinstance(job, Shape) else self.plan(job)

    def measure(self, shape: Shape) -> ShapeCost | str:
        """Measure the time and the memory of the model's layers with the sizes of `shape`. Return
        the reason if the model cannot be split so."""
        stages, dp = 3, max(1, shape.ep // shape.cp)
        keys = {
            **LayoutChoice(shape, dp, stages, "1f1b", None, self.config.optimizer.zero).keys,
            "train.global_batch": stages * dp * shape.microbatch,
            "pipeline.stage_layout": [1, self.config.model.layers - 2, 1],
        }
        equal = with_keys(self.config, {"plan.links": {}, "plan.rank_speeds": None})
        plain = equal.model_copy(update={"pipeline": PipelineConfig()})
        try:
            units = self._units(plain, keys, stages * dp * shape.tp * shape.cp)
            cost = ShapeCost.of(units, known_speeds(units.config))
        except MegapipeError as error:
            return str(error)
        unequal = self.config.plan.rank_speeds is not None
        return cost._replace(is_uniform=False) if unequal else cost

    def plan(self, job: LayoutJob) -> LayoutPlan:
        """Plan a layout as far as needed: raise its bound by a simulation of its schedule, then
        plan its memory, then its time."""
        try:
            return self._plan(job)
        except MegapipeError as error:
            return LayoutPlan(None, refusal=str(error))

    def _plan(self, job: LayoutJob) -> LayoutPlan:
        units = self.units(job.choice)
        bound = max(job.bound, job.cost.simulated_seconds(units.layout))
        if bound >= job.limit:
            return LayoutPlan(bound)
        size, speeds = demand(units).most.total, known_speeds(units.config)
        if fits(size, speeds) is False:
            return LayoutPlan(bound, size)
        found = estimate(job.choice, units, speeds)
        assert found.seconds >= bound * (1 - 1e-9), (job.choice, bound, found.seconds)
        return LayoutPlan(bound, size, found)

    def units(self, choice: LayoutChoice) -> Units:
        """Resolve a layout; return the costs of its stages, which are measured when they are used.

        Raises:
            MegapipeError: a layout that is impossible.
        """
        return self._units(self.config, choice.keys, self.gpus)

    def _units(self, config: Config, keys: Mapping[str, Any], world: int) -> Units:
        return Units(*resolve(with_keys(config, keys), world, None, measure=BY_UNITS), self.cache)
