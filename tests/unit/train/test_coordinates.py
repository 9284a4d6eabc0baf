"""Where a run is, as a checkpoint has it: values of other types are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint import Checkpoint, Meta, SingleProcess, save
from megapipe.errors import CheckpointError
from megapipe.train.resume.coordinates import ResumePoint


def stored(folder: Path, **given: Any) -> Checkpoint:
    meta = Meta(run_id="a-run", layout={}, coordinates=given, config={})
    return Checkpoint.open(save(folder, step=3, pieces=[], meta=meta, group=SingleProcess()))


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    """A checkpoint of an older version lacks it; what a newer one says besides is ignored."""
    found = ResumePoint.of(stored(tmp_path, samples=24, later={"a": [1]}))
    assert (found.updates, found.samples, found.lr) == (3, 24, 0.0)
    assert (found.order, found.threads) == ("", 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("samples", value) for value in (None, -1, 2.5, True, "7")),
        *(("updates", value) for value in (-1, [3])),
        *(("lr", value) for value in (-1e-3, "1e-3", None)),
        *(("order", {"a": 1}), ("threads", "4")),
    ],
)
def test_another_type_is_one_line(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, **{"samples": 24, key: value})
    with pytest.raises(CheckpointError) as caught:
        ResumePoint.of(checkpoint)
    told = str(caught.value)
    assert told.startswith(f"{checkpoint.path}: coordinates.{key}")
    assert "\n" not in told
