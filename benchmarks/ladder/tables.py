"""Output of results: tables on the console, and Markdown with all that they depend on."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from common import Result, report
from rich.console import Console
from rich.table import Table as RichTable

from megapipe.layout.devices import peak as peak_of
from megapipe.observe.provenance import provenance

GIB = 2**30
WIDTH = 220
"""Columns of lines that do not go to a terminal."""


@dataclass(frozen=True)
class Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def finish(
    title: str,
    command: Sequence[str],
    device: torch.device,
    results: Sequence[Result],
    tables: Sequence[Table],
    *,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Print everything and write the requested files."""
    for table in tables:
        show(table)
    report(title, results, json)
    if markdown is not None:
        about = environment(device, shlex.join(command))
        markdown.write_text(document(title, about, results, tables), encoding="utf-8")


def show(table: Table) -> None:
    """Print a table; its lines are as long as it needs where they go to a file."""
    rich = RichTable()
    for heading in table.headings:
        rich.add_column(heading)
    for row in table.rows:
        rich.add_row(*row)
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    console.print(f"\n{table.title}", rich, sep="\n", markup=False, highlight=False)


def dense_peak(device: torch.device) -> float | None:
    """Return the TFLOP/s of the device in bf16, if known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def environment(device: torch.device, command: str) -> list[tuple[str, str]]:
    """Return hardware, versions, command and date."""
    found = provenance(Path(__file__).parents[2])
    versions = {name: number for name, number in found["versions"].items() if number}
    git = found["git"]
    lines = [
        ("date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("command", f"`{command}`"),
        ("device", platform.processor() or platform.machine()),
        ("versions", ", ".join(f"{name} {number}" for name, number in versions.items())),
    ]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / GIB
        lines[2] = ("device", f"{properties.name}, {memory:.1f} GiB, driver {_driver()}")
        cudnn = torch.backends.cudnn.version()
        lines.append(("CUDA", f"{torch.version.cuda}, cuDNN {cudnn}, triton {_triton()}"))
    if git is not None:
        lines.append(("commit", git["commit"] + (" and changes" if git["dirty"] else "")))
    return lines


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def claims_table(results: Sequence[Result]) -> Table:
    rows = [
        [
            r.claim,
            f"{r.value:.4g} {r.unit}",
            f"{'>=' if r.at_least else '<='} {r.target:.4g}",
            r.peer,
            "yes" if r.met else "no",
        ]
        for r in results
    ]
    return Table("Claims", ["claim", "value", "target", "against", "met"], rows)


def document(
    title: str,
    about: Sequence[tuple[str, str]],
    results: Sequence[Result],
    tables: Sequence[Table],
) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in about)
    parts = [claims_table(results), *tables]
    return "\n\n".join([f"# {title}", facts, *(table.markdown() for table in parts)]) + "\n"
