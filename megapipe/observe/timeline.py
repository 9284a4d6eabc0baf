"""Timelines of a measured step as pictures, next to the simulator's prediction."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megapipe.schedule.async_schedules.excerpt import Excerpt
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.render.picture import picture
from megapipe.schedule.render.scene import stack
from megapipe.schedule.render.vector import to_svg
from megapipe.schedule.timing.idle import Idle, idle
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.schedule.timing.trace import trace
from megapipe.util.no_symlinks import write_no_symlinks

Span = tuple[Time, Time]


def write_timeline(folder: Path, step: int, measured: Timeline, plan: Cost) -> str:
    """Write ``timeline/step_<step>.json`` and ``.svg``; return a line of text about the step.

    The JSON file is for ui.perfetto.dev. Both files show the measured step, and a simulation with
    the measured costs (median time per stage and kind of operation; no latency). The line also
    gives the idle share of a simulation with the costs of `plan`. The two simulations differ if a
    stage's share of the time is not its share of the FLOPs. Raises OSError if a file cannot be
    written.
    """
    simulated = simulate(measured.schedule, measured.cost)
    planned = simulate(measured.schedule, plan)
    both = {"measured": measured, "simulated": simulated}
    path = _write(folder, step, both, {})
    return (
        f"timeline of step {step}: {measured.makespan:.3g} s, simulated with its own costs "
        f"{simulated.makespan:.3g} s; idle {measured.bubble_makespan:.1%}, simulated "
        f"{max(0.0, simulated.bubble_makespan):.1%}, by the plan's FLOPs "
        f"{float(planned.bubble_makespan):.1%}: {_by_cause(idle(measured), measured)}; "
        f"see {path}"
    )


class RecordedWindow(NamedTuple):
    """A recorded update window of a no-flush schedule, in an excerpt with neighbouring windows."""

    cut: Excerpt
    number: int
    """Index of the update window in the excerpt."""
    measured: Timeline
    """Timeline of the whole excerpt."""

    def span(self, timeline: Timeline) -> Span:
        """Return when the update window begins and ends on the first rank."""
        return self.cut.span(timeline, self.number)


def write_window(folder: Path, step: int, window: RecordedWindow, plan: Cost) -> str:
    """Write the files of :func:`write_timeline` for one update window of a no-flush schedule;
    return a line of text about it.

    The picture shows the update window's time span on the first rank, next to a simulation. The
    JSON file also has the update windows before and after it.
    """
    measured = window.measured
    simulated, planned = (window.cut.simulated(cost) for cost in (measured.cost, plan))
    both = {"measured": measured, "simulated": simulated}
    spans = {name: window.span(timeline) for name, timeline in both.items()}
    path = _write(folder, step, both, spans)
    seconds = {name: float(end - begin) for name, (begin, end) in spans.items()}
    idle = [timeline.idle_between(*window.span(timeline)) for timeline in (*both.values(), planned)]
    return (
        f"timeline of step {step}: {seconds['measured']:.3g} s, simulated with its own costs "
        f"{seconds['simulated']:.3g} s; idle {idle[0]:.1%}, simulated {max(0.0, idle[1]):.1%}, by "
        f"the plan's FLOPs {max(0.0, idle[2]):.1%}; see {path}"
    )


def _write(
    folder: Path, step: int, both: Mapping[str, Timeline], spans: Mapping[str, Span]
) -> Path:
    """Write named timelines to one JSON file and one picture; `spans` limits the time that the
    picture shows. Return the picture's path."""
    name = f"timeline/step_{step:06d}"
    write_no_symlinks(folder, f"{name}.json", json.dumps(trace(both, unit=1e6)))
    scenes = [picture(_named(timeline, of), span=spans.get(of)) for of, timeline in both.items()]
    write_no_symlinks(folder, f"{name}.svg", to_svg(stack(scenes)))
    return folder / f"{name}.svg"


def _named(timeline: Timeline, name: str) -> Timeline:
    schedule = timeline.schedule
    return replace(timeline, schedule=replace(schedule, name=f"{name}, {schedule.name}"))


def _by_cause(ranks: Sequence[Idle], timeline: Timeline) -> str:
    whole = len(ranks) * float(timeline.makespan)
    return ", ".join(
        f"{cause} {float(sum(getattr(rank, cause) for rank in ranks)) / whole:.1%}"
        for cause in Idle._fields
    )
