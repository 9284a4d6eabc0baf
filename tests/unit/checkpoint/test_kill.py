"""A process may die at any system call of a save: an earlier or the new checkpoint is found."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megapipe.checkpoint import clear_leftovers, find_newest, outdated, remove, save, shard
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import REMOVED
from tests.unit.checkpoint.checkpoint_worlds import (
    META,
    assert_holds,
    flat_cut,
    is_sound,
    run_world,
    save_alone,
    tensors,
)

CALLS = [(os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink")]
CALLS += [(os, "rmdir"), (shard, "checksum")]


class Killed(BaseException):
    """An error in place of SIGKILL: no handler for ordinary errors sees it."""


@contextmanager
def killing(at: int | None, when: str = "before") -> Iterator[list[str]]:
    """Die before or after the `at`-th call of CALLS; yields the calls made."""
    made: list[str] = []

    def wrap(real, name):
        def call(*args, **options):
            made.append(name)
            if len(made) - 1 == at and when == "before":
                raise Killed
            result = real(*args, **options)
            if len(made) - 1 == at:
                raise Killed
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, wrap(getattr(module, name), name))
        yield made


def count_calls(root: Path) -> list[str]:
    save_alone(root, 1)
    with killing(None) as made:
        save_alone(root, 2, seed=2, shard_bytes=1200)
    return made


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_call_leaves_a_checkpoint(tmp_path, when):
    calls = count_calls(tmp_path / "count")
    assert len(calls) > 15
    assert {"mkdir", "fsync", "rename", "replace", "unlink", "checksum"} <= set(calls)
    renamed = calls.index("rename")
    for at in range(len(calls)):
        root = tmp_path / str(at)
        save_alone(root, 1, seed=1)
        with killing(at, when), pytest.raises(Killed):
            save_alone(root, 2, seed=2, shard_bytes=1200)
        found = find_newest(root)
        committed = at > renamed or (at == renamed and when == "after")
        assert found == (root / f"step-0000000{1 + committed}", [])
        assert_holds(found.path, 1 + committed)

        again = save_alone(root, 2, seed=3)
        assert find_newest(root) == (again, [])
        assert_holds(again, 3)
        clear_leftovers(root)
        left = {"latest", "step-00000001", "step-00000002"}
        assert {p.name for p in root.iterdir()} == left | {again.name}
        shutil.rmtree(root)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_in_retention_leaves_what_is_kept(tmp_path, when):
    def retain(root, newest):
        paths = [root / key.name for key in committed(root)]
        remove(root, outdated(paths, 1, newest, is_sound))

    def fill(root):
        (root / ".staging-00000001-left").mkdir(parents=True)
        (root / ".staging-00000001-left" / "x").write_text("x")
        return [save_alone(root, step, seed=step) for step in (1, 2, 3)]

    newest = fill(tmp_path / "count")[-1]
    with killing(None) as calls:
        retain(tmp_path / "count", newest)
    assert calls.count("rename") == 2
    for at in range(len(calls)):
        root = tmp_path / str(at)
        newest = fill(root)[-1]
        with killing(at, when), pytest.raises(Killed):
            retain(root, newest)
        for path in root.glob("step-*"):
            assert_holds(path, int(path.name[-1]))
        assert find_newest(root) == (newest, [])
        retain(root, newest)
        assert {p.name for p in root.iterdir()} == {"latest", newest.name, REMOVED}
        again = [save_alone(root, step).name for step in (1, 2)]
        assert again == ["step-00000001.1", "step-00000002.1"], "a name is given once"


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("exchange", range(5))
def test_a_rank_that_dies_between_phases(tmp_path, victim, exchange):
    """Exchanges: staged, staging name, written, committed, final name."""
    previous = save_alone(tmp_path, 1, seed=1)

    def work(group):
        if group.rank == victim:
            left = exchange
            inner = group._exchange

            def exchange_or_die(value):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return inner(value)

            group._exchange = exchange_or_die
        pieces = flat_cut(tensors(2), group.rank, 3)
        return save(tmp_path, step=2, pieces=pieces, meta=META, group=group)

    results = run_world(3, work)
    assert isinstance(results[victim], Killed)
    assert all(isinstance(result, BaseException) for result in results)
    found = find_newest(tmp_path)
    if exchange < 3:
        assert found == (previous, [])
        assert_holds(previous, 1)
    else:
        assert found == (tmp_path / "step-00000002", [])
        assert_holds(found.path, 2)


def test_nothing_is_renamed_before_it_is_durable(tmp_path, monkeypatch):
    """Record writes and fsyncs; at each rename, all that it publishes must be on disk."""
    save_alone(tmp_path, 1)
    durable: dict[Path, tuple[int, bytes] | frozenset[str]] = {}
    events: list[str] = []

    def content(path: Path):
        if path.is_dir():
            return frozenset(p.name for p in path.iterdir())
        return path.stat().st_size, path.read_bytes()

    def fsync(handle, real=os.fsync):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        assert stat.S_ISDIR(os.fstat(handle).st_mode) == path.is_dir()
        durable[path] = content(path)
        if path == tmp_path:
            events.append("sync")
        return real(handle)

    def publish(real):
        def move(source, target):
            source, target = Path(source), Path(target)
            inside = list(source.iterdir()) if source.is_dir() else []
            for path in [source, *inside]:
                assert durable[path] == content(path), f"{path} is published but not durable"
            if target.name == "latest":
                named = source.read_text().strip()
                assert named in durable[target.parent], "pointer before a durable rename"
            events.append(target.name)
            return real(source, target)

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", publish(os.rename))
    monkeypatch.setattr(os, "replace", publish(os.replace))
    save_alone(tmp_path, 2, shard_bytes=1200)
    assert events == ["step-00000002", "sync", "latest", "sync"]
