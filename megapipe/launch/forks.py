"""Starts ranks of this program as forks of one process that has loaded torch and the trainer.

To load them takes each process some seconds, and longer from a network file system or with fewer
cores than ranks. A node does it once here, for all its ranks and for each start of the job: the
launcher forks a process while it has no threads, and that process forks the ranks. (Python's
forkserver does the same, but its children are not the launcher's, which waits for ranks.)

A rank is then as if torchrun had started it: an environment of its own, signals as they were before
the launcher listened to them, a session of its own, output without a buffer, no other files, and
the launcher as its parent. Other programs may count on what is set before torch is loaded, so they
are started as torchrun does.
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
"""``python -m megapipe train`` is the program too."""
INIT = Path(__file__).resolve().parents[1] / "__init__.py"
LOADED = ("megapipe.cli", "megapipe.train.job", "megapipe.train.main", "megapipe.train.trainer")
"""Modules that the program imports sooner or later."""
POLL_S = 0.01
_END_WITH_PARENT, _ADOPT = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)."""


def can_fork(command: Sequence[str]) -> bool:
    """Whether the ranks of a job may be forks: of this package's own program, on Linux, where this
    process has no other thread, and Python looks beside the program or in the current folder."""
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
    """Whether Python would find another package of this name in the current folder."""
    here = PathFinder.find_spec(PACKAGE, [str(Path.cwd())])
    return here is not None and here.origin is not None and Path(here.origin).resolve() != INIT


class ForkServer:
    """A process that forks ranks, to be made when torch is loaded and there are no threads.

    `restore` is called in it, and sets signals to what they are to be in ranks. It ends with this
    process, or when the channel to it is closed.
    """

    def __init__(self, restore: Callable[[], None]) -> None:
        _prctl(_ADOPT, 1)
        self._channel, other = Pipe()
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # that process does not hear those that the terminal or a scheduler sends to all
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
        """End that process; the ranks go on."""
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)  # it may be loading
        os.waitpid(self._pid, 0)

    def handler(
        self, *, args: Sequence[object], env: Mapping[str, str], **_: object
    ) -> RankHandler:
        """Start a rank; in place of torch's function of subprocess handlers. `args` are those of
        Python: ``-u train.py`` or ``-u -m megapipe train``, and what comes after; `env` is added to
        this process's.

        Raises :class:`LaunchError` where the system cannot."""
        arguments = [str(argument) for argument in args[1:]]
        files = resource.RLIMIT_NOFILE
        try:
            resource.prlimit(self._pid, files, resource.getrlimit(files))  # ranks inherit it
            self._channel.send((arguments, {**os.environ, **env}))
            answer = self._channel.recv()
        except (OSError, EOFError):
            answer = "the process that forks them is gone"
        if isinstance(answer, str):
            raise LaunchError(f"rank {env.get('RANK')} cannot be started: {answer}")
        return RankHandler(answer)


class RankHandler:
    """The handler, as torchrun's agent knows one, of a child that this process has not made."""

    def __init__(self, pid: int) -> None:
        self.proc = _Child(pid)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to its session."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class _Child:
    """The part of ``subprocess.Popen`` that the agent uses."""

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
    """Fork a rank per request, until the launcher asks no more."""
    _load()
    gc.freeze()  # pages of what is there stay shared
    while True:
        try:
            arguments, environ = channel.recv()
        except (EOFError, OSError):
            os._exit(0)
        between = os.fork()
        if between == 0:  # the launcher adopts the children of a process that ends
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
    """Load what the program will need. Nothing in it may look for devices: CUDA does not bear a
    fork."""
    for name in LOADED:
        importlib.import_module(name)


def _become(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Set this process up as Python does that for ``python -u`` with such arguments."""
    threads = environ.get("OMP_NUM_THREADS")
    if threads != os.environ.get("OMP_NUM_THREADS") and threads:  # which was read by what is loaded
        import torch

        torch.set_num_threads(int(threads))
    os.environ.clear()
    os.environ.update(environ)
    if _is_module(arguments):  # argv[0] is set when it is run
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
    """Run the program, and end as it does; no signals are blocked but `signals`."""
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
    """A block that this process does not outlive, whatever is raised in it."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_files(but: int) -> None:
    """Close all but the three that every process has, and one."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != but:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
