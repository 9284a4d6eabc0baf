"""Folders and links in the way of a run's files are told before anything takes time."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

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
