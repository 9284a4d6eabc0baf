"""Recorded and profiled steps of pipelines without a flush, in whole runs."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from megapipe.engine.profiler_names import name_of
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.programs import Runs
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

pytestmark = pytest.mark.full

GIVEN = {
    "train.steps": "7",
    "model.tied_embeddings": "false",
    "parallel.pp": "2",
    "pipeline.weight_versions": "double_buffer",
    "pipeline.debug": "true",
    "log.timeline": "[1,4,7]",
    "log.profile": "[3]",
}


def test_steps_are_drawn_and_profiled_between_those_beside_them(tmp_path: Path) -> None:
    outcome = run_forked(tmp_path, 2, *arguments({**tiny(tmp_path), **GIVEN}))
    assert set(outcome.codes) == {0}, outcome.text
    folder = tmp_path / "runs/run"
    for step in (1, 4, 7):
        found = re.search(
            rf"timeline of step {step}: (\S+) s, simulated .* (\S+) s; idle", outcome.text
        )
        assert found, outcome.text
        measured, simulated = map(float, found.groups())
        assert 0 < simulated < 10 * measured
        trace = json.loads((folder / f"timeline/step_{step:06d}.json").read_text())
        names = [each["name"] for each in trace["traceEvents"] if each["ph"] == "X"]
        assert sum(re.fullmatch(r"0U\d+", name) is not None for name in names) >= 2
        picture = (folder / f"timeline/step_{step:06d}.svg").read_text()
        assert ">measured, 1f1b, double_buffer: 2 ranks" in picture
        assert re.search(r">\d+@\d+<", picture), "forwards have their versions"
    stream = load_async_schedule("1f1b", "double_buffer", ranks=2, microbatches=4)
    for rank, part in enumerate(Runs(stream).part(2, 7)):
        path = folder / f"profile/step_000003/rank_{rank:04d}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        events.sort(key=lambda event: event["ts"])
        seen = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        wanted = [name_of(action) for action in part.program.actions]
        assert [name for name in seen if name in wanted] == wanted
