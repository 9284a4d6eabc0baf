"""The line that a drawn step gets: its bubble as measured, simulated and planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from megapipe.observe.timeline import write_timeline
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.timing.simulate import simulate


def test_measured_beside_simulated_and_planned(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=3, microbatches=4)
    own, plan = Cost(1.0, 1.0, 2.0), Cost((1, 1, 3), 1, 1)
    slow = simulate(schedule, replace(own, latency=0.5))
    measured = replace(slow, cost=own)  # the messages took time that no operation did
    line = write_timeline(tmp_path, 7, measured, plan)
    expected = [simulate(schedule, cost).bubble_makespan for cost in (own, plan)]
    shares = [f"{float(share):.1%}" for share in (slow.bubble_makespan, *expected)]
    assert len(set(shares)) == 3
    found = re.search(r"; idle (\S+), simulated (\S+), by the plan's FLOPs (\S+): ", line)
    assert found is not None
    assert list(found.groups()) == shares
    assert line.startswith(
        f"timeline of step 7: {slow.makespan:.3g} s, simulated with its own costs "
        f"{simulate(schedule, own).makespan:.3g} s; "
    )
    assert (tmp_path / "timeline/step_000007.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "timeline/step_000007.json").read_text())
