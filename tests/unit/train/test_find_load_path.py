"""What checkpoint.load may name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megapipe.checkpoint.names import MANIFEST
from megapipe.errors import CheckpointError
from megapipe.train.resume.find_load_path import find_load_path


def make_run(folder: Path, *steps: int, seconds: float) -> Path:
    for step in steps:
        path = folder / f"checkpoints/step-{step:08d}"
        path.mkdir(parents=True)
        (path / MANIFEST).touch()
        os.utime(path / MANIFEST, (seconds, seconds))
    return folder


def test_folders_of_each_kind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, seconds=1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").touch()
    for name, kind, path in (
        ("run/checkpoints/step-00000003", "checkpoint", run / "checkpoints/step-00000003"),
        ("run", "checkpoints", run / "checkpoints"),
        ("run/checkpoints", "checkpoints", run / "checkpoints"),
        ("hf", "hugging_face", tmp_path / "hf"),
    ):
        assert find_load_path(str(tmp_path / name), tmp_path) == (kind, path)


def test_the_latest_is_of_the_run_that_saved_last_not_of_the_highest_step(tmp_path: Path) -> None:
    make_run(tmp_path / "long", 900, 1000, seconds=50)
    make_run(tmp_path / "short", 1, 2, seconds=60)
    make_run(tmp_path / "old", 7, seconds=40)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    (tmp_path / "cut/checkpoints/step-00000009").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "latest").symlink_to("short")  # to the one started last
    assert find_load_path("latest", tmp_path) == ("checkpoints", tmp_path / "short/checkpoints")


def test_the_latest_run_is_one_whose_newest_checkpoint_has_lost_its_manifest(
    tmp_path: Path,
) -> None:
    """Opening the run passes over that checkpoint and tells it; finding the run does not."""
    run = make_run(tmp_path / "run", 1, 2, 3, seconds=60)
    make_run(tmp_path / "older", 9, seconds=50)
    (run / "checkpoints/step-00000003" / MANIFEST).unlink()
    assert find_load_path("latest", tmp_path) == ("checkpoints", run / "checkpoints")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("latest", "latest: no run in .* has a checkpoint"),
        ("./gone", r"\./gone: no such folder: expected a checkpoint, a run folder, .*, or latest"),
        (".", r"\. is neither a checkpoint \(manifest.json\), nor a run folder"),
        (__file__, "no such folder"),
    ],
)
def test_what_is_none_of_them(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        find_load_path(name, tmp_path / "runs")
