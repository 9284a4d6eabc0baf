"""Half-written in-memory checkpoints of killed processes: nobody reads them, and they go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint import Meta, Piece, whole
from megapipe.checkpoint.names import STAGING_PREFIX
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.train.resume import memory_checkpoints
from megapipe.train.resume.memory_checkpoints import MemoryCheckpoints
from megapipe.train.state import SaveArguments
from tests.unit.train.stub_run import Mesh

META = Meta("a-run", {}, {}, {"run.folder": "runs", "run.name": "run"})
RUN = "runs/run"


class OneRank(Mesh):
    """The only rank of a mesh."""

    def __init__(self) -> None:
        super().__init__(0)
        self.world = 1

    def gather(self, text: str, axis: str) -> list[str]:
        return [text]

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        return numbers[None]


class Killed(BaseException):
    """An error in place of a signal: nothing is tidied up after it."""


def content(step: int, *, killed: bool = False) -> SaveArguments:
    """Return two tensors, or one, behind which the process is killed."""

    def pieces() -> Iterator[Piece]:
        for name in ("model/a", "model/b"):
            yield Piece(name, (4,), whole((4,)), torch.full((4,), float(step)))
            if killed:
                raise Killed

    return SaveArguments(step, META, pieces(), 32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a node with a checkpoint of step 2 and the half of one of step 4."""
    monkeypatch.setattr(memory_checkpoints, "SHARD_BYTES", 1)  # each piece has a file of its own
    copies = make_copies(tmp_path)
    copies.save(content(2))
    with pytest.raises(Killed):
        copies.save(content(4, killed=True))
    assert [*half(tmp_path).iterdir()]
    return tmp_path


def make_copies(folder: Path) -> MemoryCheckpoints:
    return MemoryCheckpoints(folder, cast(ParallelMesh, OneRank()))


def half(folder: Path) -> Path:
    (found,) = folder.glob(f"{STAGING_PREFIX}*")
    return found


def steps(folder: Path) -> list[str]:
    """Return all names in the folder, up to their steps."""
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir())


def newest(folder: Path) -> tuple[int, list[str]]:
    checkpoint, reasons = make_copies(folder).newest(RUN, 0, None)
    assert checkpoint is not None
    return checkpoint.step, reasons


def test_a_half_is_no_copy(folder: Path) -> None:
    assert newest(folder) == (2, [])


def test_a_half_under_the_name_of_a_copy_is_passed_over(folder: Path) -> None:
    name = half(folder).name.removeprefix(STAGING_PREFIX)
    taken = half(folder).rename(folder / name)
    assert newest(folder) == (2, [f"{taken}: no node has the files of rank 0"])


def test_a_copy_with_half_of_a_file_is_passed_over(folder: Path) -> None:
    make_copies(folder).save(content(6))
    (copy,) = folder.glob("step-00000006-*")
    (file, _) = sorted(copy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    step, reasons = newest(folder)
    assert step == 2
    assert [reason for reason in reasons if str(file) in reason], reasons


def test_the_next_copy_removes_a_half(folder: Path) -> None:
    make_copies(folder).save(content(6))
    assert steps(folder) == ["step-00000002", "step-00000006"]


def test_a_start_that_keeps_no_copies_removes_a_half_too(folder: Path) -> None:
    given: dict[str, Any] = {"checkpoint": {"in_memory_every": 0}}
    mesh = cast(ParallelMesh, OneRank())
    assert memory_checkpoints.memory_copies(Config.model_validate(given), folder, mesh) is None
    assert steps(folder) == []
