"""The examples of docs/models.md train, go on, plan and generate, as a user starts them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.parity.jobs import ROOT, Outcome, arguments, tiny
from tests.parity.launches import fork_script, run_forked

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r'^```python\n("""(?P<name>\w+)\.py: .*?)^```$', PAGE, re.M | re.S))
SOURCES = {name: text for text, name in BLOCKS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with all modules of the page."""
    for name, text in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def train(folder: Path, world: int, name: str, *overrides: str) -> Outcome:
    settings = tiny(folder)
    for key in [key for key in settings if key.startswith("model.")]:
        del settings[key]
    settings |= {"run.name": name, "model.dtype": "fp64", "train.steps": "4"}
    outcome = run_forked(folder, world, *arguments(settings), *overrides)
    assert set(outcome.codes) == {0}, outcome.text
    return outcome


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / f"runs/{name}/log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]


def test_the_page_has_its_examples() -> None:
    assert set(SOURCES) == {"plain_model", "split_model", "wide_model", "my_loss"}
    assert len([x for x in SOURCES["my_loss"].splitlines() if x]) <= 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "world", "overrides"),
    [
        ("plain_model", 2, ["parallel.pp=2", "pipeline.stage_layout=L*3 | L*3"]),
        pytest.param(
            *("split_model", 3, ["parallel.pp=3", "pipeline.schedule=zb_h1", "optimizer.zero=2"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("wide_model", 4, ["parallel.tp=2", "parallel.dp=2", "optimizer.zero=3"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_level_trains_goes_on_and_generates(
    module: str, world: int, overrides: list[str], folder: Path
) -> None:
    """What one process and an uninterrupted run give, in another layout and two starts."""
    source = f"model.source={module}:layers"
    train(folder, 1, "alone", source)
    train(folder, world, "cut", source, *overrides, "train.stop_after=2")
    outcome = train(folder, world, "cut", source, *overrides)
    assert "resumed from" in outcome.text
    assert losses(folder, "cut") == pytest.approx(losses(folder, "alone"), rel=1e-10)
    argv = ["runs/cut", "--prompt", "the cat", "--max-new-tokens", "5"]
    found = fork_script(folder, "scripts/generate.py", *argv)
    assert found.code == 0, found.err
    assert found.out.startswith("the cat")


@pytest.mark.slow
def test_a_loss_of_ones_own(folder: Path) -> None:
    """With the built-in model and with one's own; smoothing makes it another loss."""
    given = "train.loss_function=my_loss:smoothed"
    train(folder, 1, "plain", "model.source=plain_model:layers")
    train(folder, 2, "own", "model.source=plain_model:layers", given, "parallel.pp=2")
    train(folder, 1, "built-in", given)
    assert losses(folder, "own")[0] != pytest.approx(losses(folder, "plain")[0], rel=1e-3)
    assert all(4 < loss < 7 for loss in losses(folder, "built-in"))
