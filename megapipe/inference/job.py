"""Commands that use a model, in one process or in several: from arguments to an exit code.

Several processes (tp x pp) are started like those of a training run (:mod:`megapipe.launch`,
torchrun, srun). All processes run the same command; the first one prints. An error in any process
ends all of them, with one printed line (:mod:`megapipe.launch.shutdown`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from megapipe.command_line import (
    TRACEBACK,
    Parser,
    begin_program,
    check_temporary_folder,
    load_torch,
)
from megapipe.errors import ConfigError, MegapipeError, OutOfMemory
from megapipe.launch import devices, launch_info, rendezvous
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.shutdown import Shutdown, end_early, end_now, interrupt_early
from megapipe.launch.signals import Interrupts
from megapipe.observe.provenance import package_hash
from megapipe.text import count_noun
from megapipe.util.retries import be_quiet

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 600.0
"""Seconds that processes wait for each other: one of them may be reading a large checkpoint."""


@dataclass(frozen=True)
class InferenceLayout:
    """Layout and device of a model, for :func:`megapipe.launch.devices.choose_device`."""

    tp: int
    pp: int
    device: Literal["cpu", "cuda"]
    backend: Literal["auto"] = "auto"
    timeout_s: float = TIMEOUT_S


def add_layout(parser: Parser) -> None:
    """Add the options for the layout of a model."""
    group = parser.add_argument_group(
        "layout (several processes: python -m megapipe.launch --nproc N scripts/...)"
    )
    group.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    group.add_argument("--pp", type=int, default=1, help="pipeline ranks (%(default)s)")
    group.add_argument(
        "--device",
        default="cpu",
        help="torch device (%(default)s); with several processes: cpu, or cuda for a GPU each",
    )


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Parse `argv`, add a ``mesh`` to the arguments, and call the command's ``run`` with them.

    Return the exit code. With several processes, end this process with the code instead.
    """
    begin_program()
    info, trace = LaunchInfo(), TRACEBACK in argv
    try:
        info = launch_info.find_launch_info(os.environ)
        launch_info.spare_threads(info.local_world)
        check_temporary_folder()
        if info.local_rank > 0:
            be_quiet()
        given = parser.parse_args(argv)
        wanted = _wanted(given, info)
    except MegapipeError as error:
        return end_early(error, info, trace=trace)
    if info.world == 1:
        return _in_job(given, wanted, info, None, trace=trace)
    with Interrupts() as interrupts:
        interrupts.interrupt = partial(interrupt_early, info)
        return end_now(_in_job(given, wanted, info, interrupts, trace=trace))


def _wanted(given: argparse.Namespace, info: LaunchInfo) -> InferenceLayout:
    """Return the requested layout. Raises ConfigError if the number of processes does not match."""
    tp, pp = given.tp, given.pp
    for option, value in (("--tp", tp), ("--pp", pp)):
        if value < 1:
            raise ConfigError(f"{option} {value}: expected at least 1")
    if tp * pp != info.world:
        raise ConfigError(
            f"{count_noun(info.world, 'process')} for --tp {tp} x --pp {pp}: expected {tp * pp}, "
            f"as python -m megapipe.launch --nproc {tp * pp} starts them"
        )
    if info.world > 1 and given.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {given.device}: expected cpu or cuda, with several processes")
    return InferenceLayout(tp, pp, "cpu" if given.device == "cpu" else "cuda")


def _in_job(
    given: argparse.Namespace,
    wanted: InferenceLayout,
    info: LaunchInfo,
    interrupts: Interrupts | None,
    *,
    trace: bool,
) -> int:
    """Join the other processes, if any, and run the command. Return the exit code."""
    if info.rank == 0:
        load_torch()
    import torch

    from megapipe.distributed.mesh import Grid, ParallelMesh

    try:
        store = rendezvous.open_store(info, TIMEOUT_S)
    except MegapipeError as error:
        return end_early(error, info, trace=trace)
    ending = Shutdown(info, store, trace=trace)
    if interrupts is not None:
        interrupts.interrupt = ending.interrupt
    try:
        info = ending.info = rendezvous.place_on_host(store, info, TIMEOUT_S)
        options = {name: str(value) for name, value in vars(given).items() if name != "run"}
        versions = {"megapipe's files": package_hash(), "torch": torch.__version__}
        rendezvous.compare_ranks(store, info, {**options, **versions}, TIMEOUT_S)
        if info.world == 1:
            device, backend = device_named(given.device), "gloo"
        else:
            device, backend = devices.choose_device(wanted, info, store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rendezvous.start_process_group(store, info, backend, TIMEOUT_S)
        try:
            grid = Grid(pp=wanted.pp, tp=wanted.tp)
            with rendezvous.connecting(info):
                vars(given)["mesh"] = ParallelMesh(grid, device=device, timeout_s=TIMEOUT_S)
            given.run(given)
            sys.stdout.flush()
            given.mesh.barrier()
        finally:
            if info.world == 1:  # with several ranks, a peer may still be in a collective
                rendezvous.end_process_group(info)
        ending.leave()
        return 0
    except MegapipeError as error:
        return ending.report(error)
    except KeyboardInterrupt as error:
        if info.world == 1:
            print(file=sys.stderr)
        return ending.report_unexpected(error)
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        enough = MegapipeError("nobody reads the output")
        enough.exit_code = 0
        return ending.report(enough, printed=True)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        return ending.report(
            OutOfMemory(
                f"rank {info.rank} is out of memory: {reason}: use a smaller --batch, or more "
                "ranks (--tp, --pp)"
            )
        )
    except Exception as error:
        return ending.report_unexpected(error)


def device_named(name: str) -> torch.device:
    """Return the device `name` after a test that it works. Raises :class:`ConfigError`."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device
