"""Saving and loading checkpoints: ``python benchmarks/checkpoints.py``.

One process holds a GPT with AdamW's moments and master weights in fp32. It saves with
``TrainStep.save``, checksums and fsync included, and loads with ``TrainStep.load``, which first
verifies the whole checkpoint. On the same disk and in turn, three others are compared: the same
bytes written to one file by large writes and an fsync, that file read again, and torch's
distributed checkpoint (DCP) of the same tensors, with files synced. The fastest rounds of all sides
are compared. All of them read from the page cache, as the data were just written.

Then runs train with ``checkpoint.async_save``, by the command of users. How long training waits for
its saves, as the run's log says, is compared with the time of a step. So is the additional time
between steps with ``checkpoint.keep=1``: then each save is read again and the one before it
removed. So is a run's wait for an in-memory checkpoint (``checkpoint.in_memory_every``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import Result, parser, report
from fake_world import fake_world
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import resolve
from megapipe.text import count_noun

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 1 << 24
EVERY = 10
"""Steps between two saves of the run."""


def training(hidden: int, layers: int) -> TrainStep:
    config = Config.model_validate(
        {
            "model": {"layers": layers, "hidden": hidden, "heads": 8},
            "train": {"sequence_length": 64, "microbatch": 1, "global_batch": 1},
        }
    )
    config, layout = resolve(config, 1, 8192)
    with fake_world(Grid(), 0) as mesh:
        return TrainStep(config, layout, mesh)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Sides:
    """The timed sides, on one state; each begins without the files of its round before."""

    def __init__(self, step: TrainStep, folder: Path) -> None:
        self.step, self.folder = step, folder
        self.state = {
            f"{kind}/{owned.spec.name}": values
            for owned in step.optimizer.own_slices()
            for kind, values in owned.values.items()
        }
        self.nbytes = sum(values.nbytes for values in self.state.values())

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    def write(self) -> float:
        path = self.fresh("raw") / "file"

        def work() -> None:
            with path.open("xb", buffering=0) as file:
                for values in self.state.values():
                    data = values.view(torch.uint8).numpy().data
                    for start in range(0, len(data), BLOCK):
                        file.write(data[start : start + BLOCK])
                os.fsync(file.fileno())

        return timed(work)

    def read(self) -> float:
        buffer = memoryview(bytearray(BLOCK))

        def work() -> None:
            with (self.folder / "raw/file").open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        return timed(work)

    def save(self) -> float:
        folder = self.fresh("ours")
        return timed(lambda: self.step.save(folder, 1))

    def load(self) -> float:
        return timed(lambda: self.step.load(self.folder / "ours"))

    def dcp_save(self) -> float:
        folder = self.fresh("dcp")
        writer = FileSystemWriter(folder, sync_files=True)
        return timed(lambda: dcp_save(self.state, storage_writer=writer, no_dist=True))

    def dcp_load(self) -> float:
        reader = FileSystemReader(self.folder / "dcp")
        return timed(lambda: dcp_load(self.state, storage_reader=reader, no_dist=True))


def disk(folder: Path, step: TrainStep, rounds: int) -> list[Result]:
    sides = Sides(step, folder)
    works = {
        "raw write": sides.write,
        "save": sides.save,
        "DCP save": sides.dcp_save,
        "raw read": sides.read,
        "load": sides.load,
        "DCP load": sides.dcp_load,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = work()
            if number:  # the first round warms up
                times[name].append(seconds)
    best = {name: min(each) for name, each in times.items()}
    table = Table(title=f"{sides.nbytes / 1e9:.2f} GB", title_justify="left")
    for heading in ("", "best", "median", "GB/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, each in times.items():
        rate = sides.nbytes / best[name] / 1e9
        table.add_row(
            name, f"{best[name]:.2f} s", f"{statistics.median(each):.2f} s", f"{rate:.2f}"
        )
    Console().print(table)

    def ratio(claim: str, ours: str, theirs: str, target: float) -> Result:
        return Result(claim, best[theirs] / best[ours], target, "x", theirs, at_least=True)

    return [
        ratio("save, by the speed of a plain write", "save", "raw write", 0.85),
        ratio("save, by the speed of DCP's", "save", "DCP save", 1.2),
        ratio("load, by the speed of a plain read", "load", "raw read", 0.5),
        ratio("load, by the speed of DCP's", "load", "DCP load", 1.0),
    ]


def trained(
    folder: Path, name: str, *start: str, quick: bool, **keys: object
) -> list[dict[str, Any]]:
    """Return the log of a run that `start` starts."""
    settings = {
        "run.folder": folder,
        "run.name": name,
        "train.sequence_length": 32 if quick else 512,
        "train.global_batch": 8,
        "model.layers": 2 if quick else 6,
        "model.hidden": 32 if quick else 256,
        "log.every": 1000,
        "train.validation_samples": 8,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, *start, "train.py", *given]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = (folder / name / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def step_seconds(log: list[dict[str, Any]]) -> float:
    """Return the seconds of the median step."""
    return statistics.median(r["seconds"] for r in log if r["kind"] == "step")


def told(log: list[dict[str, Any]], pattern: str) -> list[float]:
    """Return the number that `pattern` finds in each of a run's lines that has one."""
    notes = (record["text"] for record in log if record["kind"] == "note")
    return [float(found[1]) for text in notes if (found := re.search(pattern, text))]


def between(log: list[dict[str, Any]]) -> list[float]:
    """Return seconds from the end of each step to the beginning of the next."""
    steps = [record for record in log if record["kind"] == "step"]
    return [after["time"] - after["seconds"] - step["time"] for step, after in pairwise(steps)]


def stall(folder: Path, processes: int, *, quick: bool) -> list[Result]:
    """Measure the share of a step for which a run waits for a save, and for all that a save brings,
    until older checkpoints are removed."""
    saves = 2 if quick else 5
    keys = {"checkpoint__every": EVERY, "checkpoint__background": "true", "checkpoint__keep": 1}
    keys |= {"train__steps": EVERY * saves + 1, "parallel__dp": processes}
    launch = ("-m", "megapipe.launch", "--nproc", str(processes))
    log = trained(folder, f"behind-{processes}", *launch, quick=quick, **keys)
    waited, step = told(log, r"training waited ([\d.]+) s"), step_seconds(log)
    assert len(waited) == saves, log
    gaps = between(log)
    brought = (sum(gaps) - len(gaps) * statistics.median(gaps)) / saves
    of = count_noun(processes, "process")
    what = {
        f"wait for a save in the background, {of}": statistics.median(waited),
        f"and for all that follows it, until older ones are removed, {of}": brought,
    }
    return [
        Result(name, 100 * seconds / step, 3.0, "% of a step", "one step")
        for name, seconds in what.items()
    ]


def memory_stall(folder: Path, *, quick: bool) -> Result:
    """Measure the share of a step for which a run waits for an in-memory checkpoint."""
    launch = ("-m", "megapipe.launch", "--nproc", "1", "--max-restarts", "1")
    shares = []
    for number in range(1 if quick else 3):
        keys = {"checkpoint__memory_every": EVERY, "train__steps": EVERY + 5}
        log = trained(folder, f"copied-{number}", *launch, quick=quick, **keys)
        (took,) = told(log, r"step \d+ took ([\d.]+) s")
        shares.append(100 * took / step_seconds(log))
    share = statistics.median(shares)
    return Result("wait for a copy in the node's memory", share, 5.0, "% of a step", "one step")


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--folder", type=Path, metavar="DIR", help="where to write; default: runs")
    given = options.parse_args(argv)
    hidden, layers, rounds = (64, 2, 1) if given.quick else (1024, 6, 5)
    place = given.folder or ROOT / "runs"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="benchmark-") as folder:
        results = disk(Path(folder), training(hidden, layers), rounds)
        for processes in (1, 2):
            results += stall(Path(folder), processes, quick=given.quick)
        results.append(memory_stall(Path(folder), quick=given.quick))
    report("Checkpoints", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
