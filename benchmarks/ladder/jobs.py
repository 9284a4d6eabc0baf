"""Worker processes, one after the other, within a budget of time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.bench import Work
from ladder.records import Missing, Notebook, Record, Row, read
from ladder.sizes import Size

LEAST_S = 25.0
"""Time below which a job is not started: loading libraries and one compilation take that."""
GRACE_S = 30.0
"""Time that a worker may take beyond its share before it is ended: it times a few steps in any
case, and cannot look at the clock while it compiles."""


@dataclass(frozen=True)
class Job:
    """A worker's task and its share of the time, relative to others."""

    work: Work
    weight: float

    @property
    def name(self) -> str:
        who = {"ours": "megapipe", "peer": "Hugging Face", "ablations": "ablations"}
        return f"{self.work.size}: {who[self.work.job]}"


def plan(
    sizes: Sequence[Size], parts: Sequence[str], ablated: Size | None, template: Work
) -> list[Job]:
    """Return the jobs: our side at all sizes, then the peer's, then the ablations at one size."""
    weights = {"ours": 1.0, "peer": 0.7}
    jobs = [
        Job(replace(template, job=job, size=size.name), weight * size.weight)  # type: ignore[arg-type]
        for job, weight in weights.items()
        if job in parts
        for size in sizes
    ]
    if "ablations" in parts and ablated is not None:
        jobs.append(Job(replace(template, job="ablations", size=ablated.name), 0.8))
    return jobs


def run_all(jobs: Sequence[Job], budget_s: float) -> list[Record]:
    """Run the jobs; each may use its share of the time left, and leaves the rest to others."""
    file = Path(jobs[0].work.file)
    notebook = Notebook(file)
    end = time.time() + budget_s
    for index, job in enumerate(jobs):
        left = end - time.time()
        share = left * job.weight / sum(other.weight for other in jobs[index:])
        if share < min(LEAST_S, budget_s / len(jobs) / 2):
            notebook.add(Missing(job.name, f"{max(left, 0):.0f} s left of {budget_s:.0f} s"))
            continue
        work = replace(job.work, until=time.time() + share)
        if work.job == "ablations":
            rows = searched_rows(read(file), work.size)
            if rows is None:
                notebook.add(Missing(job.name, "its largest micro-batch was not found"))
                continue
            work = replace(work, rows=max(1, rows // 4))
        print(f"-- {job.name}, up to {share:.0f} s", flush=True)
        why = run_worker(work, share + GRACE_S)
        if why is not None:
            notebook.add(Missing(f"{job.name}: what is not in the tables", why))
    return read(file)


def searched_rows(records: Sequence[Record], size: str) -> int | None:
    """Return the largest micro-batch of megapipe at a size."""
    rows = [
        r.rows for r in records if isinstance(r, Row) and (r.size, r.side) == (size, "megapipe")
    ]
    return max(rows, default=None)


def run_worker(work: Work, timeout_s: float) -> str | None:
    """Run a worker to its end; return why it failed, or None."""
    benchmarks = Path(__file__).parents[1]
    paths = [str(benchmarks), str(benchmarks.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    process = subprocess.Popen(work.command(), env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"ended after {timeout_s:.0f} s"
    finally:
        _end(process)
    return None if code == 0 else f"its process ended with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker, and the compilers that it may have started, which are of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
