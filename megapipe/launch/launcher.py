"""Starts the processes of a job on this node: ``python -m megapipe.launch --nproc 8 train.py ...``.

torchrun's agent does the work: it meets the agents of other nodes, hosts the store, starts a
process per rank and ends all when one fails. The end of a job is different. The ranks themselves
report what went wrong, so nothing is added to that, and the exit code is that of the first rank to
fail. With ``--restarts`` a run that a fault has ended is started again
(:mod:`megapipe.launch.supervisor`). A signal is handed on to the ranks, which may take as long as
they need to save, while torchrun kills them after half a minute; a second signal ends them at once.

On several nodes, run on each of them with the same ``--rdzv-id``::

    python -m megapipe.launch --nnodes 4 --nproc 8 --rdzv-endpoint node0:29400 --rdzv-id 7 train.py
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe import heartbeat
from megapipe.errors import LaunchError, MegapipeError, Preempted
from megapipe.launch import progress
from megapipe.launch.deadline import unless_within
from megapipe.launch.memory_folder import MemoryFolder
from megapipe.launch.open_files import allow_connections
from megapipe.launch.ranks import Ends
from megapipe.launch.signals import AGAIN_S, NOTICES, STOP_SIGNALS, Listener
from megapipe.launch.speaking import say
from megapipe.launch.supervisor import Supervisor, line

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

STOPPED = (signal.SIGTERM, *NOTICES)
"""Those after which a job is to be started again."""
MONITOR_S = 0.1
"""Time between two looks at the ranks."""
STANDALONE = "localhost:0"
RDZV_TIMEOUT_S = 60
KILL_S = 1.0
"""How long ranks may take to end at a second Ctrl-C: one may be stuck in C++ or stopped."""
CLOSE_S = 2.0
"""How long it may take to leave the other nodes: their store may be out of reach."""


def launch(
    command: Sequence[str],
    *,
    nproc: int | None = None,
    nnodes: int = 1,
    rdzv_endpoint: str = STANDALONE,
    rdzv_id: str | None = None,
    rdzv_timeout_s: int = RDZV_TIMEOUT_S,
    restarts: int = 0,
) -> int:
    """Run ``python *command`` in `nproc` processes on this node, one of `nnodes` that do the same.

    By default there is a process per GPU, or one. Where a fault ends a run that has begun to train,
    all nodes start it again, `restarts` times without coming further. Returns the exit code: that
    of the first rank to fail, 128 + n where signal n killed it; 0 if none fails. Raises
    :class:`LaunchError` if the nodes do not meet, :class:`TooManyRestarts`. To be called in the
    main thread.
    """
    supervisor, attempt = Supervisor(restarts), 0
    with (  # before torch is loaded, for seconds
        _Relay() as relay,
        _progress_file(restarts) as file,
        MemoryFolder(restarts > 0) as memory,
    ):
        relay.leave = memory.leave
        while True:
            own_id = f"{rdzv_id or uuid.uuid4().hex}/{attempt}"  # no key of the start before
            agent = _agent(command, nproc, nnodes, rdzv_endpoint, own_id, rdzv_timeout_s)
            code = _run(agent, relay, rdzv_endpoint)
            done = progress.read(file) if file is not None else progress.Progress()
            again = supervisor.again(code, done) if not relay.handed_on else None
            if again is None or file is None:
                return code
            if agent.get_worker_group().group_rank == 0:
                heartbeat.say(line(again, restarts, done.step))
            progress.write(file, progress.Progress(before=again.before))
            with relay.waiting():
                time.sleep(again.wait_s)
            attempt += 1


@contextlib.contextmanager
def _progress_file(restarts: int) -> Iterator[Path | None]:
    """Where the run tells how far it has come, if that is of use."""
    progress.told(os.environ)  # that of a job in which this one is started is not for it
    if restarts == 0:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="megapipe-") as folder:
        path = Path(folder, "progress")
        path.touch()
        os.environ[progress.ENVIRONMENT] = str(path)
        try:
            yield path
        finally:
            progress.told(os.environ)


def _agent(
    command: Sequence[str],
    nproc: int | None,
    nnodes: int,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_timeout_s: int,
) -> LocalElasticAgent:
    """torchrun's agent, in contact with the store of all nodes."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    nproc = nproc or _gpus()
    allow_connections(2 * nnodes * nproc)  # of the store, and ranks inherit the limit
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    logging.disable(logging.CRITICAL)  # the agent's account of each signal and failure
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=rdzv_endpoint,
        run_id=rdzv_id,
        min_nodes=nnodes,
        max_nodes=nnodes,
        read_timeout=rdzv_timeout_s,
    )
    try:
        rendezvous = get_rendezvous_handler(parameters)
    except (RendezvousError, ValueError) as error:
        raise LaunchError(f"the nodes do not meet at {rdzv_endpoint}: {error}") from None
    # nobody joins a run; and where the node of the store has ended first, the ranks still end by
    # themselves, with a word and a code, which the agent would cut short if it asked the store
    rendezvous.num_nodes_waiting = lambda: 0  # type: ignore[method-assign]
    spec = WorkerSpec(
        role="megapipe",
        local_world_size=nproc,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-u", *command),
        max_restarts=0,
        monitor_interval=MONITOR_S,
    )
    # the agent's own handler would end the ranks: it gets a signal that nobody sends
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))


def _run(agent: LocalElasticAgent, relay: _Relay, rdzv_endpoint: str) -> int:
    """Start the ranks and wait for their end; returns the exit code."""
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    group = agent.get_worker_group()
    relay.pids = lambda: [worker.id for worker in group.workers if worker.id]
    ends = Ends(relay.pids, relay.leave)
    ends.start()
    code = LaunchError.exit_code
    try:
        try:
            result = agent.run()
        finally:
            ends.over.set()
        code = _exit_code(result, relay, ends.killed)
    except (RendezvousError, TimeoutError) as error:
        raise LaunchError(f"the nodes do not meet at {rdzv_endpoint}: {error}") from None
    finally:
        with unless_within(CLOSE_S, lambda: relay.leave(code)):
            group.spec.rdzv_handler.shutdown()
    return code


def _exit_code(result: RunResult, relay: _Relay, stopped: Container[int]) -> int:
    """The exit code of a job on this node, of which nothing has been said if a rank was killed.

    Those that were `stopped`, and killed for that, had not failed."""
    failures = sorted(result.failures.items(), key=lambda failure: failure[1].pid in stopped)
    for rank, failure in failures:  # the first first; the agent ended the others
        if failure.exitcode > 0:
            return failure.exitcode
        number = -failure.exitcode
        if number == signal.SIGKILL and relay.killed_for is not None:
            return 128 + relay.killed_for
        if number in relay.handed_on and number in STOPPED:  # before it could hear it
            say(_stopped(signal.Signals(number), "before the ranks had begun"))
            return Preempted.exit_code
        if number not in relay.handed_on:
            _say_killed(rank, signal.Signals(number))
        return 128 + number
    return 0


class _Relay(Listener):
    """Hands signals on to the ranks; kills what a second SIGINT or SIGTERM does not end."""

    def __init__(self) -> None:
        self.handed_on: set[int] = set()
        self.killed_for: int | None = None
        """The second signal, where ranks were killed because they did not end by it."""
        self.pids: Callable[[], list[int]] = list
        """The ranks that there are."""
        self.leave: Callable[[int], object] = os._exit
        """Ends this process at once."""
        self._when = "before the ranks had begun"
        """When it is that there are no ranks."""
        self._last: float | None = None
        """When SIGINT or SIGTERM last came, monotonic seconds."""
        super().__init__(STOP_SIGNALS)

    def arrived(self, number: signal.Signals) -> None:
        self.handed_on.add(number)
        self._send(number)
        if not self.pids():
            if number not in STOPPED:
                self.leave(128 + number)
            say(_stopped(number, self._when))
            self.leave(Preempted.exit_code)
        if number in NOTICES:
            return
        now = time.monotonic()
        if self._last is not None and now - self._last >= AGAIN_S:
            killer = threading.Timer(KILL_S, self._kill, [number])
            killer.daemon = True
            killer.start()
        self._last = now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Between two starts."""
        self.pids, self._when = list, "while it was to be started again"
        yield

    def _kill(self, number: int) -> None:
        self.killed_for = number
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _stopped(number: signal.Signals, when: str) -> Preempted:
    return Preempted(f"stopped by {number.name} {when}")


def _say_killed(rank: int, number: signal.Signals) -> None:
    """The line for a rank that was killed and could not say it."""
    hint = "; the system does so when memory runs out" if number == signal.SIGKILL else ""
    say(LaunchError(f"rank {rank} was killed by {number.name}{hint}"))


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own = sys.argv[0]  # as a console command: megapipe launch
    parser = argparse.ArgumentParser(
        prog=own if own.startswith("megapipe ") else "python -m megapipe.launch",
        description="Starts the processes of a job on this node and hands on their exit code.",
        usage="%(prog)s [options] PROGRAM.py [arguments]   (or: -m MODULE [arguments])",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc", "--nproc-per-node", type=int, metavar="N",
        help="processes on this node; default: its number of GPUs, or 1",
    )  # fmt: skip
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes (default 1)")
    parser.add_argument(
        "--rdzv-endpoint", default=STANDALONE, metavar="HOST:PORT",
        help="where the nodes meet, on one of them; needed with several",
    )  # fmt: skip
    parser.add_argument(
        "--rdzv-id", metavar="ID", help="name of the job on all nodes; needed with several"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N",
        help="start a run again that a fault has ended, from its newest checkpoint: so many times "
        "without coming further (default 0); after two faults at the same step from an older one",
    )  # fmt: skip
    options, command = _split(argv)
    parser.add_argument(
        "--rdzv-timeout", type=int, default=RDZV_TIMEOUT_S, metavar="SECONDS",
        help=f"how long to look for the node at --rdzv-endpoint (default {RDZV_TIMEOUT_S})",
    )  # fmt: skip
    arguments = parser.parse_args(options)
    if not command:
        parser.error("no program: expected train.py or another")
    numbers = (arguments.nnodes, arguments.rdzv_timeout, arguments.nproc)
    if any(number is not None and number < 1 for number in numbers):
        parser.error("--nproc, --nnodes and --rdzv-timeout: expected a number >= 1")
    if arguments.restarts < 0:
        parser.error("--restarts: expected a number >= 0")
    if arguments.nnodes > 1 and (arguments.rdzv_endpoint == STANDALONE or not arguments.rdzv_id):
        parser.error("several nodes need --rdzv-endpoint HOST:PORT and --rdzv-id ID to meet")
    return arguments, command


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's options, each ``--name value`` or ``--name=value``, and what it is to run."""
    if {"-h", "--help"}.intersection(argv[:1]):
        return list(argv), []
    at = 0
    while at < len(argv) and argv[at].startswith("--"):
        at += 1 if "=" in argv[at] else 2
    return list(argv[:at]), list(argv[at:])


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() or 1


def main(argv: Sequence[str]) -> int:
    """Start what `argv` says; returns the exit code."""
    arguments, command = _parse(argv)
    try:
        return launch(
            command,
            nproc=arguments.nproc,
            nnodes=arguments.nnodes,
            rdzv_endpoint=arguments.rdzv_endpoint,
            rdzv_id=arguments.rdzv_id,
            rdzv_timeout_s=arguments.rdzv_timeout,
            restarts=arguments.restarts,
        )
    except MegapipeError as error:
        say(error)
        return error.exit_code
