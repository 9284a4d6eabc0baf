"""The search for a layout (megapipe plan) by several processes, and with what is in the cache."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megapipe.plan.cache import Cache
from megapipe.plan.search import search
from megapipe.plan.search.search import Progress
from megapipe.util.process_pool import ProcessPool
from tests.parity.searches import search_of

WORDS = (
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.vocab_size=300"),
    *("train.sequence_length=64", "train.global_batch=8", "plan.device=H100"),
    *("parallel.ranks_per_node=4", "parallel.device=cuda"),
)
FIXED: Mapping[str, str] = {"activations.policy": "keep", "parallel.pp": "1"}


class Pools(list[int]):
    """Sizes of the pools that are started; a replacement for ProcessPool."""

    def __call__(self, size: int, *arguments: Any) -> Any:
        self.append(size)
        return ProcessPool(2, *arguments)

    def __getitem__(self, of: Any) -> Any:
        return self


def searched(cache: Cache, seen: list[Progress]) -> Sequence[object]:
    found = search_of(WORDS, FIXED, 4, cache).run(3, seen.append)
    assert found.complete
    return found.best, found.considered


def test_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, seen = Pools(), list[Progress]()
    monkeypatch.setattr(search, "cores", lambda: 3)
    monkeypatch.setattr(search, "MIN_POOLED", 4)
    monkeypatch.setattr(search, "ProcessPool", pools)
    cache = Cache([tmp_path / "pool"])
    found = searched(cache, seen)
    assert pools == [3]
    shapes = [each for each in seen if each.what == "shapes measured"]
    assert [each.done for each in shapes] == [*range(1, shapes[0].total + 1)]
    files = {path.name for path in (tmp_path / "pool").iterdir()}

    again = list[Progress]()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPool, "_start", None)
        assert searched(cache, again) == found
    assert not again, "nothing is planned anew"
    assert {path.name for path in (tmp_path / "pool").iterdir()} == files

    pools.clear()
    monkeypatch.setattr(search, "MIN_POOLED", 100)
    assert searched(Cache([tmp_path / "alone"]), []) == found
    assert not pools


def test_an_interrupt_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layouts planned so far are the result, and are not planned again."""
    monkeypatch.setattr(search, "MIN_POOLED", 4)
    monkeypatch.setattr(search, "cores", lambda: 2)
    cache = Cache([tmp_path])

    def interrupt(progress: Progress) -> None:
        if progress.best is not None:
            raise KeyboardInterrupt

    found = search_of(WORDS, FIXED, 4, cache).run(3, interrupt)
    assert not found.complete
    assert len(found.best) == len(found.planned) == 1
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [child for child in children if b"process_pool" in command_line(child)]
    record = cache.read(search_of(WORDS, FIXED, 4, cache)._key, search.SearchRecord)
    assert record is not None
    assert [*record.plans] == [str(found.best[0].choice)]


def command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
