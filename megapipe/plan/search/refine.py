"""Layouts whose stages differ: recomputation by stage, and layers moved off the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megapipe.errors import MegapipeError
from megapipe.layout.speeds import Speeds
from megapipe.plan.memory_fit import demand, fits
from megapipe.plan.search.estimate import Estimate, estimate
from megapipe.plan.search.layouts import POLICIES, LayoutChoice
from megapipe.plan.search.planner import Planner
from megapipe.plan.step_time import timed_cost
from megapipe.schedule.ir import Kind

MOST_MOVES = 20
"""Maximum number of layers that are moved."""


class Refiner:
    """Improves found layouts, one stage after the other."""

    def __init__(
        self, planner: Planner, speeds: Speeds, notify: Callable[[Estimate], None]
    ) -> None:
        """Prepare.

        Args:
            planner: planner of the search that has found the layouts.
            speeds: speed of the device.
            notify: function that is called with the best layout after each plan.
        """
        self._planner, self._speeds, self._notify = planner, speeds, notify

    def refine(self, found: Estimate) -> Estimate:
        """Return a layout that fits and is at least as fast: later ranks, which hold fewer
        micro-batches, recompute less (AdaPipe), and layers leave the slowest rank as long as that
        shortens the step. A layout on one pipeline rank stays as it is."""
        if found.choice.pp == 1:
            return found
        best = self._loosened(found)
        for _ in range(MOST_MOVES):
            moved = self._moved(best)
            if moved is None or moved.seconds >= best.seconds:
                return best
            best = moved
        return best

    def _loosened(self, best: Estimate) -> Estimate:
        """Recompute less on one rank after the other, the last one first."""
        uniform = best.choice.shape.policy
        placement = self._planner.units(best.choice).layout.schedule.placement
        policies = [uniform] * placement.stages
        for policy in reversed(POLICIES[: POLICIES.index(uniform)]):
            for rank in reversed(range(placement.ranks)):
                tried = list(policies)
                for stage in placement.stages_of(rank):
                    tried[stage] = policy
                found = self._planned(best.choice, {"activations.policy": tried})
                if found is not None and found.seconds <= best.seconds:
                    best, policies = found, tried
        return best

    def _moved(self, best: Estimate) -> Estimate | None:
        """Move a layer from the slowest rank to the one with least work; None if that is
        impossible."""
        units = self._planner.units(best.choice)
        layout, times = units.layout, timed_cost(units, self._speeds).table(units.layout.stages)
        placement = layout.schedule.placement
        counts = [len(stage.layers) for stage in layout.stage_layers]
        of_stage = [
            sum(float(times[kind][stage]) for kind in (Kind.F, Kind.I, Kind.W))
            for stage in range(placement.stages)
        ]
        work = [sum(of_stage[s] for s in placement.stages_of(r)) for r in range(placement.ranks)]
        slow, idle = work.index(max(work)), work.index(min(work))
        source = max(placement.stages_of(slow), key=lambda stage: (counts[stage], stage))
        target = min(placement.stages_of(idle), key=lambda stage: (counts[stage], -stage))
        if source == target or not counts[source]:
            return None
        counts[source] -= 1
        counts[target] += 1
        return self._planned(best.choice, {"pipeline.stage_layout": counts})

    def _planned(
        self, choice: LayoutChoice, changes: Mapping[str, Sequence[Any]]
    ) -> Estimate | None:
        """Plan a layout with other values by stage; None if it is impossible or does not fit."""
        changed = choice.with_stages(changes)
        try:
            units = self._planner.units(changed)
            if fits(demand(units).most.total, self._speeds) is False:
                return None
            found = estimate(changed, units, self._speeds)
        except MegapipeError:
            return None
        self._notify(found)
        return found
