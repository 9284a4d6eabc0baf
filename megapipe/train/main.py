"""One process of a training job, from its arguments to its exit code."""

import os
import threading
from collections.abc import Sequence
from functools import partial

from megapipe.command_line import INTERRUPTED, TRACEBACK, begin_program, escape_unencodable_output
from megapipe.errors import MegapipeError, Preempted
from megapipe.launch import launch_info, shutdown
from megapipe.launch.signals import StopRequest


def main(argv: Sequence[str]) -> int:
    """Train, print a plan or explain keys, as `argv` says; never returns.

    Threads of torch and of loggers must not delay or change the exit code, so the process ends at
    once. torch's C++ side is silenced: it prints stack traces for errors reported in one line.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    escape_unencodable_output()
    shutdown.end_now(train(argv))


def train(argv: Sequence[str]) -> int:
    """Do what `argv` asks; return the exit code."""
    begin_program()
    info = launch_info.LaunchInfo()
    trace = TRACEBACK in argv
    ender = threading.RLock()

    def end(error: MegapipeError) -> int:
        ender.acquire()  # never released: if another thread ends the process, this one waits
        return shutdown.end_early(error, info, trace=trace)

    def leave(error: Preempted) -> int:
        if not ender.acquire(blocking=False):  # another thread ends the process already
            return error.exit_code
        return shutdown.end_early(error, info, trace=trace)

    with StopRequest() as stop:
        try:
            with stop.steady:  # which process prints errors follows from the launch info
                stop.leave = leave
                try:
                    info = launch_info.find_launch_info(os.environ)
                except MegapipeError:
                    info = launch_info.guess_launch_info(os.environ)
                    raise
            stop.interrupt = partial(shutdown.interrupt_early, info)
            launch_info.spare_threads(info.local_world)
            # imported late: they take a second, in which a signal may come
            from megapipe import cli
            from megapipe.config.help import help_text
            from megapipe.train import job

            command = cli.parse(argv)
            if command.help is not None:
                if info.rank == 0:
                    cli.show(help_text(command.help))
                return 0
            return job.start(command, info, stop)
        except MegapipeError as error:
            return end(error)
        except KeyboardInterrupt:
            return end(shutdown.interrupted(info)) if info.world > 1 else INTERRUPTED
