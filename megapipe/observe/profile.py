"""Traces of single steps by torch's profiler, one file per rank, for ui.perfetto.dev.

``python -m megapipe.observe.profile runs/NAME/profile/step_000020`` merges the files of all ranks
into one, with different process numbers for each rank. Times of one host are comparable; times of
several hosts are comparable only if the hosts' clocks agree.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megapipe.command_line import Parser, run_command
from megapipe.errors import DataError
from megapipe.util.no_symlinks import open_no_symlinks

MERGED = "merged.json.gz"
PROCESSES_PER_RANK = 1000
"""Number of process ids reserved for a rank in a merged file: one for the host, others for GPUs."""


class StepProfile:
    """The profile of one step on this rank; operations are named by
    :mod:`megapipe.engine.profiler_names`."""

    def __init__(self, folder: Path, step: int, *, rank: int, place: str, on_gpu: bool) -> None:
        self._run_folder, self._name = folder, f"profile/step_{step:06d}"
        self.folder = folder / self._name
        self.rank = rank
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profile(activities=activities)
        about = {"rank": rank, "place": place, "step": step}
        self._about = json.dumps(about)

    def start(self) -> None:
        """Start the profiler, which takes seconds the first time in a process."""
        self._profile.start()
        self._profile.add_metadata_json("megapipe", self._about)

    def stop(self) -> None:
        """Wait for the device, end the profile and write its file, or raise OSError."""
        if ProfilerActivity.CUDA in self._profile.activities:
            torch.cuda.synchronize()
        self._profile.stop()
        name = f"{self._name}/rank_{self.rank:04d}.json.gz"
        with (
            tempfile.TemporaryDirectory() as own,  # torch needs a path, and follows links
            open_no_symlinks(self._run_folder, name, "wb") as file,
            gzip.open(file, "wb") as out,
        ):
            path = Path(own, "trace.json")
            self._profile.export_chrome_trace(str(path))
            with path.open("rb") as trace:
                shutil.copyfileobj(trace, out)


def merge(folder: Path) -> Path:
    """Merge the traces of all ranks in `folder` into one file; returns its path.

    Raises:
        DataError: there are no traces, or one is damaged.
    """
    paths = sorted(folder.glob("rank_*.json.gz"))
    if not paths:
        raise DataError(f"{folder}: no rank_*.json.gz, expected the folder of a profiled step")
    base = None
    with (
        open_no_symlinks(folder, MERGED, "wb") as file,
        gzip.open(file, "wt", encoding="utf-8") as out,
    ):
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for path in paths:
            try:
                trace = json.loads(gzip.decompress(path.read_bytes()))
                rank, place = (trace["megapipe"][key] for key in ("rank", "place"))
                base = trace["baseTimeNanoseconds"] if base is None else base
                shift = (trace["baseTimeNanoseconds"] - base) / 1e3
                events = trace["traceEvents"]
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is not a trace of a rank ({error})") from None
            for event in _renumbered(events, rank, f"rank {rank} ({place})", shift):
                out.write(separator + json.dumps(event))
                separator = ",\n"
        out.write("\n]}\n")
    return folder / MERGED


def _renumbered(
    events: list[dict[str, Any]], rank: int, name: str, shift_us: float
) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with process and flow numbers that differ from other ranks' numbers."""
    numbers: dict[int, int] = {}
    for event in events:
        process = event.get("pid")
        if not isinstance(process, int):  # the profiler's own events
            continue
        number = numbers.setdefault(process, rank * PROCESSES_PER_RANK + len(numbers))
        changed = {**event, "pid": number}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift_us
        if "id" in event:
            changed["id"] = f"{rank}/{event['id']}"
        if event.get("ph") == "M" and event["name"] == "process_name":
            changed["args"] = {"name": name}
        if event.get("ph") == "M" and event["name"] == "process_sort_index":
            changed["args"] = {"sort_index": number}
        yield changed


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m megapipe.observe.profile",
        description="Merge the traces of all ranks into one.",
    )
    parser.add_argument("folder", type=Path, help="folder of a profiled step: .../profile/step_N")
    parser.set_defaults(run=lambda given: print(merge(given.folder)))
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
