"""Times that are read from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.cli import dump, parse
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.plan.measured_run import MeasuredRun
from megapipe.schedule.cost import Cost
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.trace import trace

KEYS = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab_size=300"),
    *("train.sequence_length=32", "train.global_batch=4", "parallel.pp=2", "parallel.device=cpu"),
)
DEVICE = ["plan.device=cpu"]


def write_run(folder: Path, *keys: str) -> None:
    """Write a run of six steps and two timelines, whose operations take times of their own."""
    config, layout = resolve(parse([*KEYS, *keys]).config, None, None)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    tokens = config.train.tokens_per_step
    seconds = (9.0, 8.0, 1.0, 3.0, 2.0, 2.0)
    lines = [{"kind": "note", "text": "begin"}]
    lines += [
        {"kind": "step", "step": number, "seconds": each, "tokens": tokens}
        for number, each in enumerate(seconds, start=1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline").mkdir(exist_ok=True)
    own, other = (
        simulate(layout.schedule, Cost(F=(f, 2.0), I=(1.0, 1.0), W=(1.0, 2.0))) for f in (1.0, 7.0)
    )
    for number in (3, 4):
        both = {"measured": own, "simulated": other}
        text = json.dumps(trace(both, unit=1e6))
        (folder / "timeline" / f"step_{number:06d}.json").write_text(text)


def test_medians_of_operations_and_steps_are_read(tmp_path: Path) -> None:
    """The simulation beside the measured timeline, and the first two steps, do not count."""
    write_run(tmp_path)
    run = MeasuredRun.read(tmp_path, DEVICE)
    assert run.step == 2.0
    expected = {(0, "F"): 1.0, (0, "B"): 2.0, (1, "F"): 2.0, (1, "B"): 3.0}
    assert run.operations == pytest.approx(expected)
    assert run.units.config.plan.device == "cpu"


def test_operations_on_slices_are_added_up(tmp_path: Path) -> None:
    write_run(tmp_path, "pipeline.schedule=seq1f1b", "pipeline.sequence_slices=2")
    run = MeasuredRun.read(tmp_path, DEVICE)
    assert run.operations[1, "F"] == pytest.approx(2.0)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected the folder of a run, with a config.yaml"):
        MeasuredRun.read(tmp_path, DEVICE)


def test_a_run_without_timelines_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    for file in (tmp_path / "timeline").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"expected a run with timelines: set log.timeline"):
        MeasuredRun.read(tmp_path, DEVICE)


def test_a_run_without_a_device_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"expected --device NAME"):
        MeasuredRun.read(tmp_path, [])


def test_a_damaged_timeline_or_log_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "timeline" / "step_000003.json"
    good = file.read_text()
    for text in ("{", "[]", '{"traceEvents": [{"ph": "X"}]}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"step_000003.json: expected a timeline"):
            MeasuredRun.read(tmp_path, DEVICE)
    file.write_text(good)
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:3]))
    with pytest.raises(ConfigError, match=r"log.jsonl: expected more than 2 steps of 128 tokens"):
        MeasuredRun.read(tmp_path, DEVICE)
