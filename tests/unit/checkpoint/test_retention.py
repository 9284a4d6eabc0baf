import errno
import os
import shutil
from pathlib import Path

import pytest

from megapipe.checkpoint import clear_leftovers, find_newest, outdated, remove
from megapipe.checkpoint.failed import FailedCheckpoints, mark
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.local import LocalPath
from megapipe.checkpoint.names import FAILED_PREFIX, REMOVED
from tests.unit.checkpoint.checkpoint_worlds import assert_holds, is_sound, save_alone


def names(root):
    return sorted(p.name for p in root.iterdir() if p.name != REMOVED)


def retain(root, keep, newest):
    """Remove what is not needed any more; what was removed."""
    paths = [root / key.name for key in committed(root)]
    done = remove(root, outdated(paths, keep, newest, is_sound))
    assert not done.problems
    return done.removed


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_the_newest_stay(tmp_path, keep):
    paths = [save_alone(tmp_path, step, seed=step) for step in (1, 2, 3, 4, 5)]
    removed = retain(tmp_path, keep=keep, newest=paths[-1])
    assert removed == paths[: max(0, 5 - keep)][::-1]
    assert names(tmp_path) == ["latest", *(p.name for p in paths[max(0, 5 - keep) :])]
    for path in paths[max(0, 5 - keep) :]:
        assert_holds(path, int(path.name[-1]))


def lose(path: Path) -> None:
    (path / "manifest.json").unlink()


def flip(path: Path) -> None:
    """Damage a checkpoint without a change of length."""
    shard = path / "00000-0000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("damage", [lose, flip])
@pytest.mark.parametrize("which", [2, 3])
def test_a_damaged_one_does_not_count_as_kept(tmp_path, damage, which):
    """Even the newest one does not count: the intact ones that are older stay."""
    paths = [save_alone(tmp_path, step) for step in (1, 2, 3, 4)]
    damage(paths[which])
    assert retain(tmp_path, keep=2, newest=paths[3]) == [paths[0]]
    assert names(tmp_path) == ["latest", *(p.name for p in paths[1:])]


def test_of_those_that_do_not_count_as_many_are_kept(tmp_path):
    """A run that makes bad checkpoints again and again does not fill the disk."""
    paths = [save_alone(tmp_path, 5) for _ in range(6)]
    older = [save_alone(tmp_path, step) for step in (4, 3, 2, 1)]
    newest_first = [*paths[::-1], *older]
    old = outdated(newest_first, 2, paths[-1], older.__contains__)
    assert old == [*paths[3::-1], *older[2:]]
    assert outdated(newest_first, 2, paths[0], older.__contains__) == [*paths[3:0:-1], *older[2:]]


def test_nothing_is_looked_at_where_nothing_could_go(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (1, 2)]
    assert outdated(paths[::-1], 2, paths[1], lambda path: 1 / 0) == []


def test_the_one_just_saved_is_kept_even_if_older_than_the_others(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (10, 20, 30, 5)]
    assert retain(tmp_path, keep=2, newest=paths[-1]) == [paths[0]]
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000020", "step-00000030"]


def test_attempts_of_a_step_count_one_by_one(tmp_path):
    paths = [save_alone(tmp_path, 5) for _ in range(3)]
    retain(tmp_path, keep=2, newest=paths[2])
    assert names(tmp_path) == ["latest", "step-00000005.1", "step-00000005.2"]
    assert save_alone(tmp_path, 5).name == "step-00000005.3"


def test_no_name_is_given_twice(tmp_path):
    """Commands and retention may have removed checkpoints in between, in any order."""
    given = [save_alone(tmp_path, step).name for step in (2, 5, 5)]
    for steps in ([5], [5, 2], [5], [7, 3], [7, 6], [2]):
        assert not remove(tmp_path, [tmp_path / key.name for key in committed(tmp_path)]).problems
        given += [save_alone(tmp_path, step).name for step in steps]
    assert given[3:7] == [f"step-0000000{end}" for end in ("5.2", "5.3", "2.3", "5.4")]
    assert given[7] == "step-00000007", "none was saved before"
    assert len(set(given)) == len(given)
    assert len(list(tmp_path.glob(".*"))) == 1, "and what tells of it does not grow"


def test_a_mark_goes_with_its_checkpoint(tmp_path):
    path = [save_alone(tmp_path, step) for step in (2, 5)][-1]
    (tmp_path / f"{FAILED_PREFIX}{path.name}").touch()
    remove(tmp_path, [path])
    assert names(tmp_path) == ["latest", "step-00000002"]


def test_a_mark_of_what_no_finite_step_follows_stays_until_a_later_step_is_there(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (2, 5, 5)]
    mark(tmp_path, "step-00000005", not_finite=True)
    remove(tmp_path, paths[1:2])
    failed = FailedCheckpoints.read(tmp_path)
    assert failed.not_finite(at_least=5, at_most=5) == ["step-00000005"]
    assert failed.not_finite(at_least=6) == failed.not_finite(at_most=4) == []
    save_alone(tmp_path, 6)
    remove(tmp_path, paths[2:])
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000006"]


def test_a_mark_whose_checkpoint_was_removed_by_hand_marks_no_other(tmp_path):
    path = save_alone(tmp_path, 5)
    (tmp_path / f"{FAILED_PREFIX}{path.name}").touch()
    shutil.rmtree(path)
    assert save_alone(tmp_path, 5).name == "step-00000005.1"


def test_a_full_disk_keeps_nothing_from_being_removed(tmp_path, monkeypatch):
    """What is known of names is written when there is room again."""
    paths = [save_alone(tmp_path, step) for step in (2, 5)]
    replace = LocalPath.replace

    def fail_at_first(self, data):
        if paths[1].exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        replace(self, data)

    monkeypatch.setattr(LocalPath, "replace", fail_at_first)
    assert remove(tmp_path, paths[1:]) == ([paths[1]], [])
    monkeypatch.undo()
    assert save_alone(tmp_path, 5).name == "step-00000005.1"

    def fail(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr(LocalPath, "replace", fail)
    (problem,) = remove(tmp_path, [tmp_path / "step-00000005.1"]).problems
    assert "may be used again: " in problem
    assert names(tmp_path) == ["latest", "step-00000002"]


def test_a_record_that_is_garbage_stops_no_save(tmp_path):
    (tmp_path / REMOVED).write_bytes(b"\xff../x")
    path = save_alone(tmp_path, 5)
    assert path.name == "step-00000005"
    assert not remove(tmp_path, [path]).problems
    assert (tmp_path / REMOVED).read_text() == "step-00000005\n"


def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path, monkeypatch):
    """It fails as on NFS, where a file that is still open elsewhere stays."""
    paths = [save_alone(tmp_path, step) for step in (1, 2, 3, 4)]
    (tmp_path / ".staging-00000001-a").mkdir()
    (tmp_path / ".staging-00000001-b").mkdir()
    rename, rmtree = os.rename, shutil.rmtree

    def fail_for(stubborn, real):
        def call(path, *rest):
            if Path(path).name == stubborn:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            return real(path, *rest)

        return call

    monkeypatch.setattr(os, "rename", fail_for("step-00000002", rename))
    monkeypatch.setattr(shutil, "rmtree", fail_for(".staging-00000001-a", rmtree))
    done = remove(tmp_path, [paths[1], paths[0]])
    assert done.removed == [paths[0]]
    assert [line.split("; ")[0] for line in done.problems] == [
        f"cannot remove {tmp_path / name}: Device or resource busy"
        for name in ("step-00000002", ".staging-00000001-a")
    ]
    assert names(tmp_path) == [".staging-00000001-a", "latest", *(p.name for p in paths[1:])]
    assert find_newest(tmp_path).path == paths[3]


def test_leftovers_of_killed_saves_are_cleared_and_nothing_else(tmp_path):
    assert clear_leftovers(tmp_path / "missing") == ([], [])
    path = save_alone(tmp_path, 1)
    (tmp_path / ".staging-00000002-x").mkdir()
    (tmp_path / ".staging-00000002-x" / "00000-0000.safetensors").write_bytes(b"half")
    (tmp_path / ".staging-latest-y").write_text("half")
    done = clear_leftovers(tmp_path)
    assert [p.name for p in done.removed] == [".staging-00000002-x", ".staging-latest-y"]
    assert names(tmp_path) == ["latest", path.name]
    assert_holds(path, 0)


def test_other_files_and_links_are_left_alone(tmp_path):
    outside = tmp_path / "outside"
    kept = save_alone(outside, 1)
    root = tmp_path / "root"
    newest = [save_alone(root, step) for step in (3, 4)][-1]
    (root / "step-00000002").symlink_to(kept)
    (root / ".staging-link").symlink_to(outside)
    (root / "notes.txt").write_text("mine")
    (root / "step-00000001-backup").mkdir()
    retain(root, keep=1, newest=newest)
    assert names(root) == [
        "latest",
        "notes.txt",
        "step-00000001-backup",
        "step-00000002",
        "step-00000004",
    ]
    assert_holds(kept, 0)
