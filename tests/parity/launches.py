"""Scripts of the repository as processes, many in a short time.

:func:`fork_script` and :func:`run_forked` fork each script from a server that has loaded torch and
transformers. The launcher, the start of the interpreter and these imports are left out. The rest is
as on a command line: a process with its own arguments, folder, environment and streams runs the
script as ``__main__``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from tests.parity.forked import start_server
from tests.parity.jobs import LAUNCHERS, LIMIT_S, ROOT, Outcome, free_port
from tests.parity.privileges import obey_permissions

PROCESSOR_S = 15.0
"""Seconds of processor time within which a mistake is reported; the machine may be shared."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    def assert_one_line(self, code: int, *needles: str) -> None:
        """Assert that it has printed one line, with these words, and nothing else."""
        assert self.code == code, (self.code, self.err)
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith(("megapipe: error: ", "megapipe: stopped by ")), self.err
        for needle in needles:
            assert needle in self.err, self.err


def run_script(folder: Path, script: str, *argv: str) -> Ended:
    """Run a script in an interpreter of its own, in `folder`, within :data:`PROCESSOR_S`."""
    began = _processor_s()
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *argv],
        cwd=folder,
        env=_environment({}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert _processor_s() - began < PROCESSOR_S
    return Ended(done.returncode, done.stdout, done.stderr)


def _processor_s() -> float:
    """Return the processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fork_script(folder: Path, script: str, *argv: str) -> Ended:
    """Run a script in a fork of a server that has loaded its modules, in `folder`."""
    (code,), out, err = _fork(folder, script, argv, 1, {}, LIMIT_S)
    return Ended(code, out, err)


def run_forked(
    folder: Path,
    ranks: int,
    *argv: str,
    script: str = "train.py",
    environ: Mapping[str, str] | None = None,
    places: Mapping[str, str | None] | None = None,
    privileged: bool = True,
    last: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Run a job of `ranks` forked processes in `folder`.

    `places` changes the variables that place a rank: {rank} in a value is its number, {port} the
    store's; None: not set. Without `privileged` permissions bind the processes, even root's.
    `last`: further arguments of the last rank.
    """
    began = time.monotonic()
    codes, out, err = _fork(
        folder, script, argv, ranks, environ or {}, limit_s, places or {}, privileged, last
    )
    seconds = time.monotonic() - began
    assert seconds < limit_s, f"the job does not end:\n{out}{err}"
    return Outcome(out + err, codes, seconds)


def _fork(
    folder: Path,
    script: str,
    argv: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    limit_s: float,
    places: Mapping[str, str | None] = MappingProxyType({}),
    privileged: bool = True,
    last: Sequence[str] = (),
) -> tuple[list[int], str, str]:
    """Return the exit codes, and what all processes have written to both streams. Kill what takes
    longer than the limit."""
    context = multiprocessing.get_context("forkserver")
    start_server()

    def taken(name: str) -> str:
        paths = [folder / f".{name}-{rank}" for rank in range(ranks)]
        texts = [path.read_text(errors="replace") for path in paths]
        for path in paths:
            path.unlink()
        return "".join(texts)

    port, began = free_port(), time.monotonic()
    processes = []
    for rank in range(ranks):
        world = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        given = {**world, "MASTER_ADDR": "127.0.0.1"} if ranks > 1 else {}
        streams = [str(folder / f".{name}-{rank}") for name in ("out", "err")]
        variables = _environment({**environ, **given})
        for name, value in places.items():
            variables.pop(name, None)
            if value is not None:
                placed = value.replace("{rank}", str(rank)).replace("{port}", str(port))
                variables[name] = placed
        own = [*argv, *(last if rank == ranks - 1 else ())]
        process = context.Process(
            target=_run, args=(str(folder), variables, streams, script, own, privileged)
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(max(0.1, began + limit_s - time.monotonic()))
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    codes = [process.exitcode or 0 for process in processes]
    return codes, taken("out"), taken("err")


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not LAUNCHERS.match(key)}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **given}


def _run(
    folder: str,
    environ: dict[str, str],
    streams: Sequence[str],
    script: str,
    argv: Sequence[str],
    privileged: bool,
) -> None:
    """Become the process that ``python SCRIPT ARGV`` is in `folder`."""
    os.setsid()
    if not privileged:
        obey_permissions()
    for stream, path in zip((1, 2), streams, strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # the server has read its own
    os.chdir(folder)
    path = str(ROOT / script)
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
