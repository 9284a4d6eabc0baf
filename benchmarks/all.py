"""Benchmarks one after the other, with earlier results: ``python benchmarks/all.py``.

Each result is kept in ``benchmarks/results``, with the commit, the day, the machine and its load.
With ``--since`` every row is compared with the kept one: a row that is worse by a tenth is printed,
with the commit that measured it, and the exit code is 1. ``--write`` puts what is kept into the
table of docs/benchmarks.md. Benchmarks that need a GPU are not among them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import parser, quiet

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results of benchmarks/all.py -->\n", "<!-- end of results -->\n"
NAMES = (
    "step",
    "peers",
    "startup",
    "dry_run",
    "planner",
    "plan_search",
    "calibration",
    "split_backward",
    "bubble",
    "engine_overhead",
    "post_validation",
    "async_pipelines",
    "zero",
    "tensor_parallel",
    "context_parallel",
    "moe",
    "memory",
    "large_worlds",
    "schedule_scale",
    "state_precision",
    "staleness",
    "data",
    "checkpoints",
    "finite",
)
WORSE = 0.1
"""Part of a value by which a row has to be worse to be printed."""
MOST_LOAD = 2.0
"""Load of the last minute above which nothing is measured."""

Row = Mapping[str, Any]
Kept = Mapping[str, Any]
"""Content of a file of results: commit, date, machine, load, versions, results."""


def circumstances() -> dict[str, Any]:
    """Return the commit, the day, the machine and the versions on which results depend."""
    commit = _git("rev-parse", "--short=8", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in lines.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def measure(name: str, *, quick: bool) -> list[Row] | None:
    """Run a benchmark and return its rows; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
        code = subprocess.run([*command, *(["--quick"] if quick else [])]).returncode
        if code or not file.exists():
            print(f"{name}.py ended with exit code {code}: nothing is kept of it", file=sys.stderr)
            return None
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
        return rows


def is_worse(row: Row, before: Row) -> bool:
    """Whether a value is worse than before by more than :data:`WORSE` of it, or was a number and is
    not one now."""
    if before["value"] is None or row["value"] is None:
        return row["value"] is None and before["value"] is not None
    if row["at_least"]:
        return bool(row["value"] < (1 - WORSE) * before["value"])
    return bool(row["value"] > (1 + WORSE) * before["value"])


def fallen(rows: Sequence[Row], kept: Kept) -> Iterator[str]:
    """Yield a line for each row that is worse than the kept one of the same claim."""
    before = {row["claim"]: row for row in kept["results"]}
    for row in rows:
        like = before.get(row["claim"])
        if like is not None and is_worse(row, like):
            values = (
                f"{each['value']:.4g}" if each["value"] is not None else "none"
                for each in (row, like)
            )
            now, then = values
            yield (
                f"{row['claim']}: {now} {row['unit']}, was {then} at {kept['commit']} "
                f"({kept['date']})"
            )


def read(name: str) -> Kept | None:
    """Read what is kept of a benchmark; None if nothing is."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return None
    found: Kept = json.loads(file.read_text(encoding="utf-8"))
    return found


def keep(name: str, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Keep the rows of a benchmark."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**about, "results": list(rows)}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def table() -> str:
    """Return the table of all that is kept, as docs/benchmarks.md has it."""
    lines = ["| command | claim | value | target | beside |", "|---|---|---|---|---|"]
    notes = []
    for name in NAMES:
        kept = read(name)
        if kept is None:
            continue
        for number, row in enumerate(kept["results"]):
            value = "none" if row["value"] is None else f"{row['value']:.4g}"
            bound = f"{'at least' if row['at_least'] else 'at most'} {row['target']:.4g}"
            command = f"`benchmarks/{name}.py`" if number == 0 else ""
            cells = command, row["claim"], f"{value} {row['unit']}", bound, row["peer"]
            lines.append(f"| {' | '.join(cells)} |")
        versions = ", ".join(f"{what} {number}" for what, number in kept["versions"].items())
        notes.append(
            f"`{name}.py` was measured at {kept['commit']}, {kept['date']}, {kept['machine']}, "
            f"load {kept['load']:g}; {versions}.\n"
        )
    return "\n".join(lines) + "\n\n" + "\n".join(notes) if notes else ""


def page(text: str) -> str:
    """Return docs/benchmarks.md with the table between its two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} lacks the mark before the table"
    assert end, f"{PAGE} lacks the mark after it"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help="benchmarks, without .py (all)")
    options.add_argument(
        "--since", action="store_true", help="tell rows that are worse than those kept; keep none"
    )
    options.add_argument(
        "--write", action="store_true", help="put what is kept into docs/benchmarks.md; run nothing"
    )
    given = options.parse_args(argv)
    wrong = sorted({*given.names} - {*NAMES})
    if wrong:
        options.error(f"there is no {wrong[0]}: expected some of {', '.join(NAMES)}")
    if given.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    return _run(given)


def _run(given: argparse.Namespace) -> int:
    lines: list[str] = []
    every: list[Row] = []
    failed = False
    about = circumstances()  # once: what is kept makes the tree differ from its commit
    for name in given.names or NAMES:
        about["load"] = load = 0.0 if given.quick else quiet(MOST_LOAD)
        print(f"{name}.py, load {load:g}", flush=True)
        if load > MOST_LOAD:
            print(f"{name}.py: not measured, load above {MOST_LOAD:g}", file=sys.stderr)
            failed = True
            continue
        rows, kept = measure(name, quick=given.quick), read(name)
        if rows is None:
            failed = True
            continue
        every += rows
        if given.since:
            lines += [] if kept is None else fallen(rows, kept)
        elif not given.quick:
            keep(name, about, rows)
    for line in lines:
        print(f"worse: {line}")
    if given.json is not None:
        given.json.write_text(json.dumps(every, indent=2) + "\n", encoding="utf-8")
    return int(failed or bool(lines))


if __name__ == "__main__":
    sys.exit(main())
