"""What git says of the tree that is tested; a tree without git has no answers."""

from __future__ import annotations

import subprocess

from tests.running.processes import ROOT


def git(*arguments: str) -> str | None:
    """Run a git command and return its output, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit(*generated: str) -> str:
    """Name the commit, with `+changes` if files other than the `generated` ones differ from it."""
    name = git("rev-parse", "--short", "HEAD")
    if name is None:
        return "no commit"
    others = [f":(exclude){path}" for path in generated]
    return f"{name}+changes" if git("status", "--porcelain", "--", ".", *others) else name


def changed_files() -> list[str]:
    """List the files that differ from where this branch left main, or on main itself from its last
    commit but one; those that are not committed are among them."""
    base = git("merge-base", "main", "HEAD")
    if base is None or base == git("rev-parse", "HEAD"):
        base = "HEAD~1"
    changed = git("diff", "--name-only", "--diff-filter=d", base) or ""
    untracked = git("ls-files", "--others", "--exclude-standard") or ""
    return [*changed.splitlines(), *untracked.splitlines()]


def changed_tests() -> list[str]:
    """List the files of tests among the changed ones."""
    return [
        name
        for name in changed_files()
        if name.startswith("tests/") and name.rpartition("/")[2].startswith("test_")
    ]
