"""Folders and links in the way of a run's files are told before anything takes time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest

from megapipe import heartbeat
from megapipe.checkpoint.run_lock import OWNER
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError
from megapipe.train import run_folder
from tests.unit.train.standing_run import Mesh


def take(folder: Path) -> run_folder.RunFolder:
    return run_folder.take(folder, cast(ParallelMesh, Mesh(0)), local_rank=0)


@pytest.mark.parametrize("name", run_folder.FILES)
def test_a_folder_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"run.folder: .*{name} is a folder: expected a file"):
        take(tmp_path)


def test_a_run_that_was_there_before(tmp_path: Path) -> None:
    for name in run_folder.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    take(tmp_path).release()


def test_what_a_killed_job_has_left_is_taken_over_and_removed(tmp_path: Path) -> None:
    """Two lines say so, which a log of the run has, and its folder is as that of any other."""
    killed = replace(heartbeat.Owner.me(), process=2**22 + 1)
    lock = tmp_path / ".lock.1"
    half = tmp_path / "checkpoints/.staging-00000002-x"
    for folder in (lock, half):
        folder.mkdir(parents=True)
    (lock / OWNER).write_text(json.dumps(asdict(killed)))
    (half / "00000-0000.safetensors").write_bytes(bytes(100))
    taken = take(tmp_path)
    assert taken.notes == [
        f"took over {tmp_path} from {killed}, which is gone",
        f"removed 1 unfinished checkpoint of killed jobs from {tmp_path / 'checkpoints'}",
    ]
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    taken.release()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
