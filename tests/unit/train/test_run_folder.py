"""What is in the way of a run's files is told before anything takes time."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError
from megapipe.train import run_folder
from tests.unit.train.standing_run import Mesh


@pytest.mark.parametrize("name", run_folder.FILES)
def test_a_folder_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"run.folder: .*{name} is a folder: expected a file"):
        run_folder.make(tmp_path, cast(ParallelMesh, Mesh(0)))


def test_a_run_that_was_there_before(tmp_path: Path) -> None:
    for name in run_folder.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    run_folder.make(tmp_path, cast(ParallelMesh, Mesh(0)))
