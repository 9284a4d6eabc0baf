"""Differences from an earlier state of the repository, as git reports them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.running.functions import line_range
from tests.running.processes import ROOT
from tests.running.revision import git

HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass
class Changes:
    """Changed files, with those that are new or gone."""

    base: str
    """Description of the commit that they are compared with."""
    lines: dict[str, int] = field(default_factory=dict)
    """File -> its changed lines, bit n for line n, and those around what is gone. 0: no line of it
    was there before, or is left."""


class NoRepositoryError(Exception):
    """Raised where git is missing, or does not know this folder."""


def _git(*arguments: str) -> str:
    printed = git(*arguments)
    if printed is None:
        raise NoRepositoryError(f"git {' '.join(arguments)} fails: expected a repository")
    return printed


def tracked_files() -> list[str]:
    """Return all files of the repository, also those that are not yet added to it."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return sorted(name for name in {*names} if (ROOT / name).is_file())


def changes_since(ref: str | None) -> Changes:
    """Compare the working tree with its common ancestor with `ref`, by default with the main
    branch; where that is the same, with the commit before.

    Raises NoRepositoryError.
    """
    main = ref or next((name for name in ("origin/main", "main") if _exists(name)), "HEAD")
    found = _compare(_git("merge-base", main, "HEAD"), main)
    if not found.lines and ref is None and _exists("HEAD~1"):
        return _compare("HEAD~1", "the commit before")
    return found


def _exists(ref: str) -> bool:
    return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is not None


def _compare(commit: str, name: str) -> Changes:
    diff = ("diff", "--no-renames", "--no-ext-diff", "--no-color")
    found = Changes(name)
    for line in _git(*diff, "--name-status", commit).splitlines():
        status, file = line.split("\t")
        lines = 0
        if status == "M":
            for first, count in HUNK.findall(_git(*diff, "--unified=0", commit, "--", file)):
                start, number = int(first), int(count or 1)
                lines |= line_range(start, start + (number - 1 if number else 1))
        found.lines[file] = lines
    for file in _git("ls-files", "--others", "--exclude-standard").splitlines():
        found.lines[file] = 0
    return found
