"""What differs from the main branch, in a repository of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import changes, revision
from tests.running.changes import Changes, NoRepositoryError, changes_since, tracked_files
from tests.running.functions import line_range
from tests.running.revision import git

LINES = "".join(f"line {number}\n" for number in range(1, 10))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with two commits on main."""
    for module in (changes, revision):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / "old.py").write_text(LINES)
    commit("one")
    (tmp_path / "two.py").write_text(LINES)
    commit("two")
    return tmp_path


def commit(message: str) -> None:
    git("add", "--all")
    git("commit", "--quiet", "--message", message)


def edit(path: Path) -> None:
    """Change line 2, add two lines after line 4 and remove line 8."""
    lines = LINES.splitlines(keepends=True)
    new = [lines[0], "two\n", *lines[2:4], "a\n", "b\n", *lines[4:7], lines[8]]
    path.write_text("".join(new))


def test_without_changes_the_last_commit_counts(root: Path) -> None:
    assert changes_since(None) == Changes("the commit before", {"two.py": 0})
    assert changes_since("main") == Changes("main", {})


def test_lines_are_those_of_the_working_tree(root: Path) -> None:
    edit(root / "old.py")
    # around what is gone it is the line before and the one after
    lines = line_range(2, 2) | line_range(5, 6) | line_range(9, 10)
    assert changes_since(None) == Changes("main", {"old.py": lines})


def test_commits_and_new_files_and_those_that_are_gone_count(root: Path) -> None:
    git("checkout", "--quiet", "-b", "branch")
    edit(root / "old.py")
    (root / "two.py").unlink()
    commit("three")
    (root / "ä new.py").write_text("new\n")
    found = changes_since(None)
    assert found.base == "main"
    assert {file: bool(lines) for file, lines in found.lines.items()} == {
        "old.py": True,
        "two.py": False,
        "ä new.py": False,
    }
    assert tracked_files() == ["old.py", "ä new.py"]


def test_commits_that_only_main_has_do_not_count(root: Path) -> None:
    git("checkout", "--quiet", "-b", "branch", "HEAD~1")
    (root / "mine.py").write_text("mine\n")
    commit("mine")
    assert changes_since(None) == Changes("main", {"mine.py": 0})


def test_a_branch_of_the_origin_comes_before_one_s_own(root: Path) -> None:
    git("update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert changes_since(None) == Changes("origin/main", {"two.py": 0})


def test_without_a_repository_nothing_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revision, "ROOT", tmp_path)
    with pytest.raises(NoRepositoryError, match="expected a repository"):
        changes_since(None)
