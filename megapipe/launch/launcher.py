"""Starts the processes of a job on this node: ``python -m megapipe.launch --nproc 8 train.py ...``.

torchrun's agent does the work: it meets the agents of other nodes, hosts the store, starts a
process per rank and ends all when one fails. Ranks of ``train.py`` and ``-m megapipe train`` begin
with torch loaded (:mod:`megapipe.launch.forks`). The end of a job is different. The ranks
themselves report what went wrong, so nothing is added to that, and the exit code is that of the
first rank to fail. With ``--restarts`` a run that a fault has ended is started again
(:mod:`megapipe.launch.supervisor`). A signal is handed on to the ranks, which may take as long as
they need to save, while torchrun kills them after half a minute; a second signal ends them at once.

On several nodes, run on each of them with the same ``--rdzv-id``::

    python -m megapipe.launch --nnodes 4 --nproc 8 --rdzv-endpoint node0:29400 --rdzv-id 7 train.py

With ``--nnodes 2:4`` a job goes on with the nodes that are left when some are lost, and takes in
those that come (:mod:`megapipe.launch.meeting`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from megapipe.command_line import begin_program, check_temporary_folder, print_error
from megapipe.errors import LaunchError, MegapipeError, Preempted
from megapipe.launch import progress
from megapipe.launch.endpoints import Endpoint, NodeRange
from megapipe.launch.forks import ForkServer, can_fork
from megapipe.launch.memory_folder import MemoryFolder
from megapipe.launch.open_files import allow_connections
from megapipe.launch.place import NODES, ONE, OPTIONS, spare_threads
from megapipe.launch.ranks import RankReaper
from megapipe.launch.signals import NOTICES, STOP_SIGNALS, Listener
from megapipe.launch.supervisor import Supervisor, line
from megapipe.words import count_noun, is_terminal

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from megapipe.launch.agent import Agent
    from megapipe.launch.meeting import ElasticRendezvous

STOPPED = (signal.SIGTERM, *NOTICES)
"""Those after which a job is to be started again."""
MONITOR_S = 0.1
"""Time between two looks at the ranks."""
ONE_NODE = NodeRange()
RDZV_TIMEOUT_S = 60
LAST_CALL_S = 30
ELASTIC_RESTARTS = 3
T = TypeVar("T")
NEWCOMERS_S = 1.0
"""Time between two looks for nodes that have come."""
KILL_S = 1.0
"""How long ranks may take to end at a second Ctrl-C: one may be stuck in C++ or stopped."""


def launch(
    command: Sequence[str],
    *,
    nproc: int | None = None,
    nodes: NodeRange = ONE_NODE,
    endpoints: Sequence[Endpoint] = (),
    rdzv_id: str = "",
    rdzv_timeout_s: float = RDZV_TIMEOUT_S,
    last_call_s: float = LAST_CALL_S,
    restarts: int = 0,
    ends: bool = False,
) -> int:
    """Run ``python *command`` in `nproc` processes on this node, one of `nodes` that do the same.

    By default there is a process per GPU, or one. Where a fault ends a run that can go on, all
    nodes start it again, `restarts` times without coming further. Returns the exit code: that
    of the first rank to fail, 128 + n where signal n killed it; 0 if none fails. Raises
    :class:`LaunchError` if the nodes do not meet or a folder for temporary files is missing,
    :class:`TooManyRestarts`. To be called in the
    main thread. With `ends` this process ends with the code, and signals are ignored from when it
    is known: a scheduler that ends the job because one launcher has ended changes nothing.
    """
    check_temporary_folder()
    if is_terminal(sys.stderr):  # somebody waits for a first line
        what = "a process for each GPU" if nproc is None else count_noun(nproc, "process")
        print(f"megapipe: starting {what}", file=sys.stderr, flush=True)
    supervisor = Supervisor(restarts, elastic=nodes.elastic)
    with (  # before torch is loaded, for seconds
        _Relay() as relay,
        _progress_file(restarts) as file,
        MemoryFolder(restarts > 0) as memory,
        contextlib.ExitStack() as within,
        relay.until_known(ends),
    ):
        relay.leave = memory.leave
        forks = within.enter_context(_load_torch(command, nproc, relay))
        nproc = nproc or _gpus()
        meeting = _meeting(nproc, nodes, endpoints, rdzv_id, rdzv_timeout_s, last_call_s)
        while True:
            with _newcomers(meeting, file):
                agent = _agent(command, nproc, meeting, relay.handed_on, forks)
                code = _run(agent, relay, meeting)
            done = progress.read(file) if file is not None else progress.Progress()
            again = supervisor.decide(code, done) if not relay.handed_on else None
            if again is None or file is None:
                return code
            meeting.tell(line(again, restarts, done.step))
            progress.write(file, progress.Progress())
            progress.write_request(file, progress.Request(again.before))
            with relay.waiting():
                time.sleep(again.wait_s)


def _load_torch(
    command: Sequence[str], nproc: int | None, relay: _Relay
) -> contextlib.AbstractContextManager[ForkServer | None]:
    """Load torch; then hear signals, and where the ranks may be forks have who forks them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    spare_threads(nproc or 1)
    import torch  # noqa: F401

    forks = ForkServer(relay.restore) if can_fork(command) else contextlib.nullcontext()
    relay.listen()
    return forks


@contextlib.contextmanager
def _progress_file(restarts: int) -> Iterator[Path | None]:
    """Where the run tells how far it has come, if that is of use."""
    progress.from_environment(
        os.environ
    )  # that of a job in which this one is started is not for it
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
            progress.from_environment(os.environ)


def _meeting(
    nproc: int,
    nodes: NodeRange,
    endpoints: Sequence[Endpoint],
    rdzv_id: str,
    rdzv_timeout_s: float,
    last_call_s: float,
) -> ElasticRendezvous:
    """This launcher's part in the meetings of all nodes."""
    allow_connections(2 * nodes.most * nproc)  # of the store, and ranks inherit the limit
    spare_threads(nproc)
    from megapipe.launch.meeting import ElasticRendezvous

    logging.disable(logging.CRITICAL)  # the agent's account of each signal and failure
    return ElasticRendezvous(
        endpoints, rdzv_id, nodes, reach_s=rdzv_timeout_s, last_call_s=last_call_s
    )


@contextlib.contextmanager
def _newcomers(meeting: ElasticRendezvous, file: Path | None) -> Iterator[None]:
    """Ask the run to stop when nodes have come that can take part: the first of its nodes does."""
    over = threading.Event()

    def look() -> None:
        while file is not None and not over.wait(NEWCOMERS_S):
            if meeting.place == 0 and meeting.nodes_waiting() and not over.is_set():
                asked = progress.read_request(file)
                progress.write_request(file, asked._replace(regroup=1))
                return

    if meeting.nodes.elastic:
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _agent(
    command: Sequence[str],
    nproc: int,
    meeting: ElasticRendezvous,
    handed_on: Container[int],
    forks: ForkServer | None,
) -> Agent:
    """torchrun's agent, for one start of the job."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from megapipe.launch.agent import Agent

    spec = WorkerSpec(
        role="megapipe",
        local_world_size=nproc,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        args=("-u", *command),
        max_restarts=0,
        monitor_interval=MONITOR_S,
    )
    # the agent's own handler would end the ranks: it gets a signal that nobody sends
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    return Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), handed_on=handed_on, forks=forks)


def _run(agent: Agent, relay: _Relay, meeting: ElasticRendezvous) -> int:
    """Start the ranks and wait for their end; returns the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    group = agent.get_worker_group()
    relay.pids = lambda: [worker.id for worker in group.workers if worker.id]
    ends = RankReaper(relay.pids, lambda: agent.has_failed, lambda: agent.has_noticed, relay.leave)
    ends.start()
    try:
        result = agent.run()
    except (RendezvousError, DistError, TimeoutError) as error:
        raise LaunchError(f"the nodes do not meet at {meeting.where}: {error}") from None
    finally:
        ends.over.set()
    return _exit_code(result, relay, ends.killed, agent.before)


def _exit_code(
    result: RunResult, relay: _Relay, stopped: Container[int], before: int | None
) -> int:
    """The exit code of a job on this node, of which nothing has been said if a rank was killed,
    or stopped by a signal before it had begun, unless another process has failed `before`, with
    this code.

    Those that were `stopped`, and killed for that, had not failed."""
    failures = sorted(result.failures.items(), key=lambda failure: failure[1].pid in stopped)
    for rank, failure in failures:  # the first first; the agent ended the others
        if failure.exitcode > 0:
            return failure.exitcode
        number = -failure.exitcode
        if number == signal.SIGKILL and relay.killed_for is not None:
            return 128 + relay.killed_for
        if number in relay.handed_on and number in STOPPED:  # before it could hear it
            if before is not None:  # a scheduler ends this launcher as another has ended
                return before
            print_error(_stopped(signal.Signals(number), "before the ranks had begun"))
            return Preempted.exit_code
        if number not in relay.handed_on:
            if before is not None:
                return before
            if failure.pid in stopped:
                error = LaunchError(
                    f"rank {rank} was stopped by a signal, and the job has ended without it"
                )
                print_error(error)
                return error.exit_code
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
        self._listens = False
        super().__init__(STOP_SIGNALS)

    def listen(self) -> None:
        self._listens = True
        super().listen()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self._listens:
            self.arrived(signal.Signals(number))

    def arrived(self, number: signal.Signals) -> None:
        self.handed_on.add(number)
        self._send(number)
        if not self.pids():
            if number not in STOPPED:
                self.leave(128 + number)
            print_error(_stopped(number, self._when))
            self.leave(Preempted.exit_code)
        if number not in NOTICES and self.count() > 1:
            killer = threading.Timer(KILL_S, self._kill, [number])
            killer.daemon = True
            killer.start()

    @contextlib.contextmanager
    def until_known(self, ends: bool) -> Iterator[None]:
        """Ignore signals from the end of the block on, where the exit code is known, if the process
        `ends` with it."""
        try:
            yield
        finally:
            if ends:
                self.ignore()

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
    print_error(LaunchError(f"rank {rank} was killed by {number.name}{hint}"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options."""
    own = sys.argv[0]  # as a console command: megapipe launch
    top = argparse.ArgumentParser(
        prog=own if own.startswith("megapipe ") else "python -m megapipe.launch",
        description="Starts the processes of a job on this node and hands on their exit code.",
        usage="%(prog)s [options] PROGRAM.py [arguments]\n"
        "       %(prog)s [options] -m MODULE [arguments]",
        allow_abbrev=False,
    )
    top.add_argument(
        "--nproc", "--nproc-per-node", type=int, metavar="N",
        help="processes on this node; default: its number of GPUs, or 1",
    )  # fmt: skip
    top.add_argument(
        "--nnodes", type=_value(NodeRange.read, "N or MIN:MAX"), default=ONE_NODE, metavar="N",
        help="nodes (default 1); MIN:MAX: start and go on with as many as there are of them",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-endpoint", type=_value(Endpoint.read, "HOST:PORT"), default=[],
        metavar="HOST:PORT[,HOST:PORT]", dest="endpoints",
        help="where the nodes meet, on one of them; needed with several. With endpoints on several "
        "of them, the first that can be had: the job survives the loss of the others",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-id", metavar="ID", help="name of the job on all nodes; needed with several"
    )
    top.add_argument(
        "--restarts", type=int, metavar="N",
        help="start a run again that a fault has ended, from its newest checkpoint: so many times "
        "without coming further; after two faults at the same step from an older one. Default 0, "
        f"as most first errors are mistakes; {ELASTIC_RESTARTS} with --nnodes MIN:MAX",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-timeout", type=int, default=RDZV_TIMEOUT_S, metavar="SECONDS",
        help=f"how long to look for the node at --rdzv-endpoint (default {RDZV_TIMEOUT_S})",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-last-call", type=int, default=LAST_CALL_S, metavar="SECONDS",
        help="how long to wait for more nodes when MIN have come and another one has not "
        f"(default {LAST_CALL_S})",
    )  # fmt: skip
    top.add_argument(
        "--verdict", type=Path, metavar="FILE",
        help="write the exit code there, if it is not 0 and no launcher of the job has written its "
        "own: what the first one to end says of the job (a scheduler ends the others)",
    )  # fmt: skip
    return top


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    options, command = _split(argv)
    own = parser()
    arguments = own.parse_args(options)
    if not command:
        own.error("no program: expected train.py or another")
    nodes = arguments.nnodes
    numbers = (arguments.rdzv_timeout, arguments.rdzv_last_call, arguments.nproc)
    if any(number is not None and number < 1 for number in numbers):
        own.error("--nproc, --rdzv-timeout and --rdzv-last-call: expected a number >= 1")
    if arguments.restarts is None:
        arguments.restarts = ELASTIC_RESTARTS if nodes.elastic else 0
    if arguments.restarts < nodes.elastic:
        own.error(f"--restarts: expected a number >= {int(nodes.elastic)}")
    told = os.environ.get(NODES) or "1"
    if nodes.most == 1 and told not in ONE and not any(o.startswith("--nnodes") for o in options):
        own.error(f"{NODES}={told} is not read: expected --nnodes {told}, or --nnodes 1")
    if nodes.most > 1 and not (arguments.endpoints and arguments.rdzv_id):
        own.error("several nodes need --rdzv-endpoint HOST:PORT and --rdzv-id ID to meet")
    return arguments, command


def nodes_of(options: Sequence[str]) -> NodeRange:
    """Return the nodes that a launcher with these options starts a job on."""
    nodes: NodeRange = parser().parse_args(options).nnodes
    return nodes


def _repeated(options: Sequence[str]) -> str:
    """Return the options of a launcher that starts the job again: the verdict was that of this
    one."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--verdict")
    return shlex.join(own.parse_known_args(options)[1])


def _value(read: Callable[[str], T], form: str) -> Callable[[str], T]:
    """The value of an option of this form."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {form}, not {text!r}") from None

    return value


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


def write_verdict(path: Path, code: int) -> None:
    """Write the exit code of the job to a file, unless another launcher's is there.

    The file may be there and empty: one that is made before the job is seen by every client of a
    network file system, as its content is looked for when it is opened.
    """
    try:
        with open(path, "a+") as file:
            file.seek(0)
            if not file.read():
                file.write(f"{code}\n")
    except OSError as error:
        print_error(LaunchError(f"--verdict {path}: {error.strerror}; the exit code is {code}"))


def main(argv: Sequence[str]) -> int:
    """Start what `argv` says; returns the exit code."""
    begin_program()
    arguments, command = _parse(argv)
    os.environ[OPTIONS] = _repeated(argv[: len(argv) - len(command)])
    try:
        code = launch(
            command,
            nproc=arguments.nproc,
            nodes=arguments.nnodes,
            endpoints=arguments.endpoints,
            rdzv_id=arguments.rdzv_id or "",
            rdzv_timeout_s=arguments.rdzv_timeout,
            last_call_s=arguments.rdzv_last_call,
            restarts=arguments.restarts,
            ends=True,
        )
    except MegapipeError as error:
        print_error(error)
        code = error.exit_code
    if arguments.verdict is not None and code:
        write_verdict(arguments.verdict, code)
    return code
