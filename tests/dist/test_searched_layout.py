"""Runs whose layout is left to a search: parallel.pp=auto, train.microbatch=auto, ..."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megapipe
from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.observe.provenance import newest_config
from megapipe.plan.search.command import main as plan
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

OPEN = {
    "model.layers": "4",
    "train.global_batch": "4",
    "train.microbatch": "auto",
    "parallel.pp": "auto",
    "pipeline.schedule": "planned",
    "plan.device": "cpu",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "units"))
    monkeypatch.setattr("megapipe.plan.search.layouts.SCHEDULES", {"1f1b": (None,), "zb_v": (2,)})


def stored(folder: Path) -> Config:
    """Return the configuration of the run's newest start."""
    newest = newest_config(folder / "runs" / "run")
    assert newest is not None
    return parse([str(newest)]).config


def chosen(config: Config) -> tuple[object, ...]:
    """Return what a search chose in a run's configuration."""
    pipeline = config.pipeline
    return (
        *(config.parallel.dp, config.parallel.pp, config.train.microbatch),
        *(pipeline.schedule, pipeline.chunks),
    )


@pytest.mark.full
def test_a_run_has_the_layout_that_the_planner_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run keeps it, unless it has another number of processes."""
    given = arguments({**tiny(tmp_path), **OPEN, "train.steps": "2"})
    outcome = run_forked(tmp_path, 2, *given)
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count("megapipe: layout: parallel.pp=") == 1
    found = chosen(stored(tmp_path))
    fixed = [
        "activations.policy=keep",
        "parallel.tp=1",
        "parallel.cp=1",
        "parallel.ep=1",
        "optimizer.zero=1",
    ]
    assert plan([*given, *fixed, "--gpus", "2", "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)[0]["keys"]
    names = ("parallel.dp", "parallel.pp", "train.microbatch", "pipeline.schedule")
    assert found == (
        *(best[name] for name in names),
        best.get("pipeline.chunks"),
    )

    outcome = run_forked(tmp_path, 2, *given, "train.steps=3", "plan.time_factor=0.5")
    assert outcome.codes == [0, 0], outcome.text
    assert "layout:" not in outcome.text
    assert chosen(stored(tmp_path)) == found

    outcome = run_forked(tmp_path, 3, *given, "train.steps=4", "train.global_batch=6")
    assert outcome.codes == [0, 0, 0], outcome.text
    assert "megapipe: layout: parallel.pp=" in outcome.text
    assert "resumed from" in outcome.text
    config = stored(tmp_path)
    assert config.parallel.dp is not None
    assert config.parallel.dp * config.parallel.pp == 3


def test_one_process_from_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    given = {**tiny(tmp_path), **OPEN, "activations.policy": "auto"}
    path.write_text("".join(f"{key}: {value}\n" for key, value in given.items()))
    searched = {"parallel.pp", "train.microbatch", "pipeline.schedule", "activations.policy"}
    assert parse([str(path)]).searched == searched
    megapipe.train(path)
    assert "layout: parallel.pp=1" in capfd.readouterr().err
    assert stored(tmp_path).parallel.pp == 1


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"pipeline.transport": "in_process"}, 1, "transport=in_process expected values of"),
        ({"plan.device": "H1000"}, 1, "plan.device=H1000 is not known"),
        ({"plan.device_gb": "0.0001"}, 2, "layouts fits: "),
        ({"parallel.tp": "4"}, 2, "no layout of 2 devices has parallel.tp=4"),
    ],
)
@pytest.mark.full
def test_a_search_that_fails_is_told_once(
    changes: dict[str, str], ranks: int, words: str, tmp_path: Path
) -> None:
    outcome = run_forked(tmp_path, ranks, *arguments({**tiny(tmp_path), **OPEN, **changes}))
    outcome.assert_one_line(2, words)


def test_other_commands_need_values() -> None:
    with pytest.raises(ConfigError, match=r"--time-slices measures a layout: expected a value of"):
        parse(["parallel.tp=auto", "--time-slices"])
    with pytest.raises(ConfigError, match=r"parallel.etp=auto: expected a whole number >= 1$"):
        parse(["parallel.etp=auto"])
    assert parse(["parallel.tp=auto", "parallel.tp=2"]).config.parallel.tp == 2
