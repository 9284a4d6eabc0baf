"""What is left behind where a GPU's memory is used up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.observe.out_of_memory import (
    HISTORY,
    is_out_of_memory,
    out_of_memory,
    remember_allocations,
)
from megapipe.plan import trace

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
        "rank 3 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB: the plan counts "
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


def test_what_the_host_refuses_is_told_beside_the_plan(tmp_path: Path) -> None:
    config, layout = resolve(parse([f"run.folder={tmp_path}"]).config, None, 257)
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**45)
    assert is_out_of_memory(refused.value)
    told = str(out_of_memory(refused.value, config, layout, 0))
    assert told.startswith(
        "rank 0 is out of memory: the host refused 141 TB at once: the plan counts "
    )
    assert "per process (parameters " in told
    assert "activations " in told
    assert "frame" not in told
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("another"))


def test_a_micro_batch_too_large_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_CALLS", 1000)
    words = [f"run.folder={tmp_path}", f"train.microbatch={2**40}", f"train.global_batch={2**41}"]
    config, layout = resolve(parse(words).config, None, 257)
    told = str(out_of_memory(MemoryError(), config, layout, 0))
    assert told.startswith(
        "rank 0 is out of memory: the host refused more: it cannot be planned (a stage runs more "
        "than 1,000 kernels for a micro-batch, too many for a plan: use a smaller "
        "train.microbatch or larger kernels.loss_chunk_tokens), no memory snapshot"
    )
    assert not (tmp_path / config.run.name / "out_of_memory/plan.txt").exists()
