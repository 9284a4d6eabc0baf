"""Starts ranks of this program as forks of one process that has loaded torch and the trainer.

Loading torch and the trainer takes each process some seconds, and longer from a network file system
or with fewer cores than ranks. The fork server loads them once per node, for all ranks and for each
start of the job. The launcher forks the server while the launcher has no threads, and the server
forks the ranks. Python's forkserver is no use: its children are not children of the launcher, which
waits for the ranks.

A forked rank is as if torchrun had started it. The rank has its own environment and session, the
signal handlers from before the launcher changed them, unbuffered output, no other open files, and
the launcher as its parent. Other programs may depend on what is set before torch is loaded, so
torchrun's own code starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megapipe.command_line import INTERRUPTED
from megapipe.errors import LaunchError
from megapipe.launch.signals import STOP_SIGNALS

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
PACKAGE = "megapipe"
"""Name of this package, by which ``python -m megapipe train`` is known as a command to fork."""
INIT = Path(__file__).resolve().parents[1] / "__init__.py"
LOADED = ("megapipe.cli", "megapipe.train.job", "megapipe.train.main", "megapipe.train.trainer")
"""Modules that the server imports before it forks ranks, because every rank needs them."""
POLL_S = 0.01
_END_WITH_PARENT, _ADOPT = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)."""


def can_fork(command: Sequence[str]) -> bool:
    """Whether the ranks of a job may be forks. They may if the program is this package's own, the
    system is Linux, this process has one thread, and Python imports from the folder of the program
    or from the current folder."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return False
    if _is_module(command):
        return not _another_package()
    return Path(command[0]).suffix == ".py" and Path(command[0]).resolve() == TRAIN


def _is_module(command: Sequence[str]) -> bool:
    return [*command[:3]] == ["-m", PACKAGE, "train"]


def _another_package() -> bool:
    """Whether Python would find another package with the name of this one in the current folder."""
    here = PathFinder.find_spec(PACKAGE, [str(Path.cwd())])
    return here is not None and here.origin is not None and Path(here.origin).resolve() != INIT


class ForkServer:
    """A process that forks ranks. Create it when torch is loaded and there are no threads.

    The server calls `restore`, which resets signals to what ranks expect. The server ends with this
    process, or when the channel to it is closed.
    """

    def __init__(self, restore: Callable[[], None]) -> None:
        _prctl(_ADOPT, 1)
        self._channel, other = Pipe()
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # the server ignores stop signals that the terminal or a scheduler sends to all processes
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._pid = os.fork()
        if self._pid == 0:
            with _end_of_process():
                os.setsid()
                _prctl(_END_WITH_PARENT, signal.SIGKILL)
                restore()
                _close_files(but=other.fileno())
                _serve(other, launcher, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server; the ranks continue."""
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)  # the server may still be loading
        os.waitpid(self._pid, 0)

    def handler(
        self, *, args: Sequence[object], env: Mapping[str, str], **_: object
    ) -> RankHandler:
        """Start a rank; replaces torch's ``get_subprocess_handler``. `args` are Python's arguments:
        ``-u train.py`` or ``-u -m megapipe train``, and the program's own. `env` is added to this
        process's environment.

        Raises :class:`LaunchError` if the system cannot start the rank.
        """
        arguments = [str(argument) for argument in args[1:]]
        files = resource.RLIMIT_NOFILE
        try:
            resource.prlimit(self._pid, files, resource.getrlimit(files))  # ranks inherit it
            self._channel.send((arguments, {**os.environ, **env}))
            answer = self._channel.recv()
        except (OSError, EOFError):
            answer = "the fork server has ended"
        if isinstance(answer, str):
            raise LaunchError(f"rank {env.get('RANK')} cannot be started: {answer}")
        return RankHandler(answer)


class RankHandler:
    """Handle of a rank of the fork server, with the interface that torchrun's agent expects."""

    def __init__(self, pid: int) -> None:
        self.proc = _Child(pid)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to all processes of the rank's session."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class _Child:
    """A rank, with the part of ``subprocess.Popen``'s interface that torchrun's agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout)
            time.sleep(POLL_S)
        return code


def _serve(channel: Connection, launcher: int, signals: Any) -> NoReturn:
    """Fork a rank for each request, until the launcher closes the channel."""
    _load()
    gc.freeze()  # memory pages of loaded modules stay shared
    while True:
        try:
            arguments, environ = channel.recv()
        except (EOFError, OSError):
            os._exit(0)
        between = os.fork()
        if between == 0:  # when `between` ends, the launcher adopts its child
            with _end_of_process():
                between = os.getpid()
                try:
                    child = os.fork()
                except OSError as error:
                    channel.send(str(error))
                    os._exit(1)
                if child != 0:
                    os._exit(0)
                while os.getppid() == between:
                    time.sleep(0.001)
                if os.getppid() != launcher:
                    os._exit(1)
                os.setsid()
                channel.send(os.getpid())
                channel.close()
                _become(arguments, environ)
                _run(arguments, signals)
        os.waitpid(between, 0)


def _load() -> None:
    """Import the modules of every rank. No import may use CUDA, which does not survive a fork."""
    for name in LOADED:
        importlib.import_module(name)


def _become(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Set up this process as ``python -u`` with these arguments would be."""
    threads = environ.get("OMP_NUM_THREADS")
    if threads != os.environ.get("OMP_NUM_THREADS") and threads:  # modules have read it
        import torch

        torch.set_num_threads(int(threads))
    os.environ.clear()
    os.environ.update(environ)
    if _is_module(arguments):  # runpy sets argv[0]
        sys.argv, sys.path[0] = [*arguments[1:]], str(Path.cwd())
    else:
        sys.argv, sys.path[0] = [*arguments], str(TRAIN.parent)
    sys.stdout, sys.stderr = _unbuffered(sys.stdout, 1), _unbuffered(sys.stderr, 2)
    with contextlib.suppress(OSError):  # the name that `top` and `ps -o comm` show
        Path("/proc/self/comm").write_text(f"rank {environ.get('RANK')}")


def _unbuffered(stream: Any, number: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.FileIO(number, "w", closefd=False),
        encoding=stream.encoding,
        errors=stream.errors,
        write_through=True,
    )


def _run(arguments: Sequence[str], signals: Any) -> None:
    """Run the program and end this process with the program's exit code. `signals`: the signals to
    block, as they were blocked when the server was forked."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        if _is_module(arguments):
            runpy.run_module(PACKAGE, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(TRAIN), run_name="__main__")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


@contextlib.contextmanager
def _end_of_process() -> Iterator[None]:
    """End this process after the body, whatever the body raises."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_files(but: int) -> None:
    """Close all open files except standard input, output and error, and descriptor `but`."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != but:
            with contextlib.suppress(OSError):  # the descriptor of the list itself
                os.close(number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
