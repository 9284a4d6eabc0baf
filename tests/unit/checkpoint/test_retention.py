import os

import pytest

from megapipe.checkpoint import retain
from megapipe.errors import CheckpointError
from tests.unit.checkpoint.checkpoint_worlds import assert_holds, save_alone


def names(root):
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_the_newest_stay(tmp_path, keep):
    paths = [save_alone(tmp_path, step, seed=step) for step in (1, 2, 3, 4, 5)]
    removed = retain(tmp_path, keep=keep, newest=paths[-1])
    assert removed == paths[: max(0, 5 - keep)][::-1]
    assert names(tmp_path) == ["latest", *(p.name for p in paths[max(0, 5 - keep) :])]
    for path in paths[max(0, 5 - keep) :]:
        assert_holds(path, int(path.name[-1]))


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[2] / "manifest.json").unlink()
    assert retain(tmp_path, keep=2, newest=paths[3]) == [paths[0]]
    assert names(tmp_path) == ["latest", *(p.name for p in paths[1:])]


def test_the_one_just_saved_is_kept_even_if_older_than_the_others(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (10, 20, 30, 5)]
    assert retain(tmp_path, keep=2, newest=paths[-1]) == [paths[0]]
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000020", "step-00000030"]


def test_attempts_of_a_step_count_one_by_one(tmp_path):
    paths = [save_alone(tmp_path, 5) for _ in range(3)]
    retain(tmp_path, keep=2, newest=paths[2])
    assert names(tmp_path) == ["latest", "step-00000005.1", "step-00000005.2"]
    assert save_alone(tmp_path, 5).name == "step-00000005.3"


def test_nothing_is_removed_if_the_newest_does_not_open(tmp_path):
    paths = [save_alone(tmp_path, step) for step in (1, 2)]
    (tmp_path / ".staging-00000001-x").mkdir()
    os.truncate(paths[1] / "00000-0000.safetensors", 5)
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match="00000-0000"):
        retain(tmp_path, keep=1, newest=paths[1])
    assert names(tmp_path) == before


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
