"""Which checkpoint a run goes on from: none whose values are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.checkpoint import Checkpoint, Meta, Piece, SingleProcess, save, whole
from megapipe.config.config import Config
from megapipe.errors import CheckpointError
from megapipe.train.resume.choose import choose_start_point

META = Meta(run_id="a-run", layout={}, coordinates={}, config={})


def saved(root: Path, step: int, dtype: torch.dtype = torch.float32, **values: float) -> Path:
    """Write a checkpoint of three entries; `values` has the last elements of some."""
    pieces = []
    for name in ("model/a", "optimizer.exp_avg/a", "optimizer.exp_avg_sq/a"):
        tensor = torch.ones(3, 5, dtype=dtype)
        tensor[-1, -1] = values.get(name.split("/")[0].removeprefix("optimizer."), 1.0)
        pieces.append(Piece(name, (3, 5), whole((3, 5)), tensor))
    pieces.append(Piece("optimizer.count/n", (), whole(()), torch.tensor(2**40)))
    return save(root, step=step, pieces=pieces, meta=META, group=SingleProcess())


def weights(root: Path, step: int) -> Path:
    """Write a checkpoint of weights alone."""
    pieces = [Piece("model/a", (3, 5), whole((3, 5)), torch.ones(3, 5))]
    return save(root, step=step, pieces=pieces, meta=META, group=SingleProcess())


class One(SingleProcess):
    """A mesh of one process."""

    def agree(self, error: str | None) -> str | None:
        return error


def chosen(root: Path, **given: Any) -> Any:
    mesh: Any = One()
    return choose_start_point(Config.model_validate(given), root / "checkpoints", mesh)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_that_are_not_finite_fall_back_to_an_older_checkpoint(
    dtype: torch.dtype, wrong: float, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    good = saved(root, 1, dtype, model=3e38)
    bad = [saved(root, 2, dtype, exp_avg_sq=wrong), saved(root, 3, dtype, model=wrong)]
    source = chosen(tmp_path)
    assert source.checkpoint.path == good
    assert source.skipped == [
        f"{bad[1]}: entry 'model/a' has values that are not finite",
        f"{bad[0]}: entry 'optimizer.exp_avg_sq/a' has values that are not finite",
    ]


def test_where_all_are_of_no_use_or_one_was_asked_for_nothing_is_trained(tmp_path: Path) -> None:
    bad = saved(tmp_path / "checkpoints", 2, exp_avg=math.nan)
    words = "entry 'optimizer.exp_avg/a' has values that are not finite"
    with pytest.raises(CheckpointError, match=words):
        chosen(tmp_path)
    with pytest.raises(CheckpointError, match=f"checkpoint.load: {bad}: {words}"):
        chosen(tmp_path / "new", checkpoint={"load": str(bad)})


def test_a_run_goes_on_from_states_wherever_weights_alone_are(tmp_path: Path) -> None:
    old, run = (tmp_path / name / "checkpoints" for name in ("old", "run"))
    first = saved(old, 1)
    newest = [weights(old, step) for step in (2, 3)][-1]
    source = chosen(tmp_path / "old")
    assert (source.checkpoint.path, source.is_own, source.skipped) == (first, True, [])
    for only, path in (("all", first), ("weights", newest)):
        load = {"load": str(tmp_path / "old"), "load_only": only}
        source = chosen(tmp_path / "run", checkpoint=load)
        found = source.checkpoint if only == "all" else source.weights
        assert (found.path, source.is_own) == (path, False)
    own = weights(run, 0)
    source = chosen(tmp_path / "run")
    assert (source.weights.path, source.checkpoint, source.is_own) == (own, None, False)
    asked = chosen(tmp_path / "run", checkpoint={"load": str(first)})
    assert (asked.weights, asked.checkpoint.path) == (None, first), "it is asked for"
    with pytest.raises(
        CheckpointError, match=r"run\.resume=must: .*: no checkpoint to resume from"
    ):
        chosen(tmp_path / "run", run={"resume": "must"})


def test_a_copy_in_memory_that_is_newer_than_the_states_is_taken(tmp_path: Path) -> None:
    """The step of weights alone does not matter."""
    root = tmp_path / "checkpoints"
    saved(root, 1)
    weights(root, 9)
    copy = Checkpoint.open(saved(tmp_path / "memory", 5))

    def newest(run: str, above: int, below: int | None) -> tuple[Checkpoint | None, list[str]]:
        return (copy if copy.step > above else None), []

    memory: Any = SimpleNamespace(newest=newest, forget=lambda step: None, has=copy.__eq__)
    mesh: Any = One()
    source = choose_start_point(Config(), root, mesh, memory=memory)
    assert source.in_memory
    assert source.checkpoint is copy
