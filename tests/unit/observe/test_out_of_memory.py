"""What is left behind where a GPU's memory is used up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.observe.out_of_memory import HISTORY, out_of_memory, remember_allocations

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 80 GiB. See documentation"


def test_a_snapshot_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, layout = resolve(parse([f"run.folder={tmp_path}", "run.name=big"]).config, None, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot")
    )
    told = str(out_of_memory(torch.OutOfMemoryError(SAID), config, layout, 3))
    folder = tmp_path / "big/out_of_memory"
    assert (folder / "rank_0003.pickle").read_text() == "snapshot"
    assert (folder / "plan.txt").read_text().startswith("plan of big")
    assert told.startswith(
        "rank 3 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB: the plan is in "
    )
    assert f"a snapshot for pytorch.org/memory_viz in {folder / 'rank_0003.pickle'}" in told
    assert "train.microbatch" in told


def test_allocations_are_remembered_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **o: asked.append(o))
    remember_allocations(torch.device("cpu"))
    assert not asked
    remember_allocations(torch.device("cuda"))
    assert asked == [{"max_entries": HISTORY}]
