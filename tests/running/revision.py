"""What git says of the tree that is tested; a tree without git has no answers."""

from __future__ import annotations

import subprocess

from tests.running.processes import ROOT


def git(*arguments: str) -> str | None:
    """Run a git command and return its output, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
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
