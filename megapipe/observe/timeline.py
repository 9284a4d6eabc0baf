"""A measured step in pictures: when each operation ran, next to what the simulator expects."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megapipe.beneath import write_beneath
from megapipe.schedule.cost import Cost
from megapipe.schedule.render.picture import picture
from megapipe.schedule.render.scene import stack
from megapipe.schedule.render.vector import to_svg
from megapipe.schedule.timing.idle import Idle, idle
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.schedule.timing.trace import trace


def write_timeline(folder: Path, step: int, measured: Timeline, plan: Cost) -> str:
    """Write ``timeline/step_<step>.json`` and ``.svg``; returns a line about the step.

    The JSON file is for ui.perfetto.dev. Both hold the measured step and its simulation with the
    measured costs (medians by stage and kind; no latency). The line also gives the idle share of a
    simulation at the costs of the `plan`: it differs as far as stages' shares of the time differ
    from their shares of the FLOPs. Raises OSError if a file cannot be written.
    """
    simulated = simulate(measured.schedule, measured.cost)
    planned = simulate(measured.schedule, plan)
    both = {"measured": measured, "simulated": simulated}
    name = f"timeline/step_{step:06d}"
    write_beneath(folder, f"{name}.json", json.dumps(trace(both, unit=1e6)))
    scenes = [picture(_named(timeline, name)) for name, timeline in both.items()]
    write_beneath(folder, f"{name}.svg", to_svg(stack(scenes)))
    return (
        f"timeline of step {step}: {measured.makespan:.3g} s, simulated with its own costs "
        f"{simulated.makespan:.3g} s; idle {measured.bubble_makespan:.1%}, simulated "
        f"{max(0.0, simulated.bubble_makespan):.1%}, by the plan's FLOPs "
        f"{float(planned.bubble_makespan):.1%}: {_by_cause(idle(measured), measured)}; "
        f"see {folder / name}.svg"
    )


def _named(timeline: Timeline, name: str) -> Timeline:
    schedule = timeline.schedule
    return replace(timeline, schedule=replace(schedule, name=f"{name}, {schedule.name}"))


def _by_cause(ranks: Sequence[Idle], timeline: Timeline) -> str:
    whole = len(ranks) * float(timeline.makespan)
    return ", ".join(
        f"{cause} {float(sum(getattr(rank, cause) for rank in ranks)) / whole:.1%}"
        for cause in Idle._fields
    )
