"""The table of figures in a document: a row for each figure, its campaign in the first cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.campaigns.campaign import Figure

HEAD = "| campaign | figure | measured | target |"
RULE = "|---|---|---|---|"


def replace_figures(path: Path, found: Mapping[str, Sequence[Figure]]) -> None:
    """Put figures into the table of a file, in the place of those of the same campaigns. The table
    is added to a file that has none, and a file made that is not there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if HEAD not in lines:
        lines += [*([""] if lines else []), HEAD, RULE]
    first = lines.index(HEAD) + 2
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    rows = [row for row in lines[first:last] if row.split("|")[1].strip() not in found]
    for name, figures in found.items():
        rows += [row_of(name, figure) for figure in figures]
    path.write_text("\n".join([*lines[:first], *rows, *lines[last:], ""]), encoding="utf-8")


def row_of(name: str, figure: Figure) -> str:
    """Return the table row of a figure; one that misses its target says so."""
    missed = "" if figure.met else " (missed)"
    return f"| {name} | {figure.what} | {figure.value}{missed} | {figure.target} |"
