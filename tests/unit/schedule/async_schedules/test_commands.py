"""Streams on the command line, and the page about them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megapipe.schedule.commands import main

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/streams.md").read_text(encoding="utf-8")
SIZE = ["--ranks", "4", "--microbatches", "4"]


def test_the_page_s_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    own = [line for line in lines if line.startswith("python scripts/schedule.py ")]
    assert len(own) > 5
    for line in own:
        assert main(shlex.split(line)[2:]) == 0, line


def test_the_page_s_picture(tmp_path: Path) -> None:
    given = ["--weight-versions", "double_buffer", "--windows", "3", "--cost", "F=2,B=4,update=1"]
    assert main(["draw", "1f1b", *SIZE, *given, "-o", str(tmp_path / "x.svg")]) == 0
    assert "(stream.svg)" in PAGE
    assert (ROOT / "docs/stream.svg").read_text() == (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("name", ["patient", "mixed"])
def test_the_page_s_policies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    module = f"policies_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(block[1])
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "1f1b", *SIZE, "--weight-versions", f"{module}:{name}", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stream"]["stages"]
    mean = [stage["mean"] for stage in stages]
    assert mean == ([1.75, 1.5, 1.25, 1] if name == "patient" else [0.75, 0.5, 0.25, 0])


def test_what_simulate_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", "1f1b", *SIZE, "--weight-versions", "stash", "--windows", "5", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["microbatches"] == 20
    assert {k: told["stream"][k] for k in ("window", "fill", "pause", "windows")} == {
        "window": 12,
        "fill": 3,
        "pause": 9,
        "windows": 5,
    }
    assert told["makespan"] == 5 * 12 + 9
    assert [stage["kept"] for stage in told["stream"]["stages"]] == [2, 2, 2, 1]


def test_drawings_have_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["1f1b", *SIZE, "--weight-versions", "double_buffer", "--windows", "3"]
    assert main(["show", *given, "--width", "400"]) == 0
    drawn = capsys.readouterr().out
    assert "F8@1" in drawn
    assert "F3@0" in drawn
    assert "U update" in drawn
    assert "updates behind" in drawn
    assert main(["draw", *given, "-o", str(tmp_path / "a.svg")]) == 0
    assert ">8@1<" in (tmp_path / "a.svg").read_text()


def test_what_is_exported_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.csv"
    given = [
        "1f1b",
        *SIZE,
        "--weight-versions",
        "predict",
        "--prediction-horizon",
        "round_trip",
        "-o",
        str(file),
    ]
    assert main(["export", *given]) == 0
    assert "2F31@6+1" in file.read_text()
    assert main(["validate", str(file)]) == 0
    file.write_text(file.read_text().replace("0B4@1", "0B4@9"))
    assert main(["validate", str(file)]) != 0
    assert "(0B4): it reads version 9 of stage 0, which does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--windows", "3"], "argument --windows: it needs --weight-versions"),
        (
            ["--weight-versions", "stash", "--chunks", "2"],
            "argument --chunks: not with --weight-versions",
        ),
        (
            ["--weight-versions", "stash", "--prediction-horizon", "update"],
            "it is for --weight-versions predict, not stash",
        ),
        (["--weight-versions", "fresh"], "weights 'fresh' are unknown"),
        (["--weight-versions", "nowhere:policy"], "there is no module 'nowhere'"),
        (
            ["--weight-versions", "double_buffer", "--extra-warmup", "2"],
            "needs at least as many, not 4",
        ),
        (
            ["--weight-versions", "stash", "--ranks-per-stage", "2,1,1"],
            "schedule 1f1b: ranks_per_stage must not be given",
        ),
    ],
)
def test_mistakes(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f1b", *SIZE, *given]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
