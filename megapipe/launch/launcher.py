"""Starts the processes of a job on this node: ``python -m megapipe.launch --nproc 8 train.py ...``.

torchrun's agent does the work: it meets the agents of other nodes, hosts the store, starts a
process per rank and ends all ranks when one fails. Ranks of ``train.py`` and ``-m megapipe train``
begin with torch loaded (:mod:`megapipe.launch.fork_server`).

The end of a job differs from torchrun's. The ranks report errors themselves, so the launcher prints
nothing more and ends with the exit code of the first rank to fail. With ``--max-restarts`` it
restarts a run that a fault has ended (:mod:`megapipe.launch.supervisor`). The launcher passes
signals to the ranks, which may take as long as they need to save; torchrun would kill them after
half a minute. A second signal ends them at once.

On several nodes, run on each of them with the same ``--rdzv-id``::

    python -m megapipe.launch --nnodes 4 --nproc 8 --rdzv-endpoint node0:29400 --rdzv-id 7 train.py

With ``--nnodes 2:4`` a job continues with the remaining nodes when some are lost, and admits new
nodes (:mod:`megapipe.launch.elastic_rendezvous`).
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
from megapipe.launch.fork_server import ForkServer, can_fork
from megapipe.launch.launch_info import NODES, ONE, OPTIONS, spare_threads
from megapipe.launch.memory_folder import MemoryFolder
from megapipe.launch.open_files import allow_connections
from megapipe.launch.rank_reaper import RankReaper
from megapipe.launch.signals import NOTICES, STOP_SIGNALS, Listener
from megapipe.launch.supervisor import Supervisor, line
from megapipe.text import count_noun, is_terminal
from megapipe.util.old_options import with_new_options

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from megapipe.launch.agent import Agent
    from megapipe.launch.elastic_rendezvous import ElasticRendezvous

STOPPED = (signal.SIGTERM, *NOTICES)
"""Signals that ask the job to save and stop. A job that one of them stops should be requeued."""
MONITOR_S = 0.1
"""Seconds between two checks whether ranks have ended."""
ONE_NODE = NodeRange()
RDZV_TIMEOUT_S = 60
LAST_CALL_S = 30
ELASTIC_RESTARTS = 3
T = TypeVar("T")
NEWCOMERS_S = 1.0
"""Seconds between two checks whether new nodes wait to join the job."""
KILL_S = 1.0
"""Seconds that ranks have to end after a second Ctrl-C; then they are killed, as a rank can be
suspended or stuck in C++."""


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
    """Run ``python *command`` in `nproc` processes on this node, as one of the `nodes` of a job.

    By default there is one process per GPU, or one if there is no GPU. If a fault ends a run that
    can continue, all nodes restart it, at most `restarts` times without progress. Return the exit
    code of the first rank to fail: 128 + n if signal n killed it; 0 if no rank fails. Raises
    :class:`LaunchError` if the nodes do not meet or a folder for temporary files is missing, and
    :class:`TooManyRestarts`. Call the function in the main thread.

    `ends`: whether the caller will end this process with the exit code. Then signals are ignored
    once the code is known, so a scheduler that ends the job because another launcher has ended
    cannot change the code.
    """
    check_temporary_folder()
    if is_terminal(sys.stderr):  # a person is waiting for the first line
        what = "a process for each GPU" if nproc is None else count_noun(nproc, "process")
        print(f"megapipe: starting {what}", file=sys.stderr, flush=True)
    supervisor = Supervisor(restarts, elastic=nodes.elastic)
    with (  # entered before torch is loaded, which takes seconds
        _Relay() as relay,
        _progress_file(restarts) as file,
        MemoryFolder(restarts > 0) as memory,
        contextlib.ExitStack() as within,
        relay.until_known(ends),
    ):
        relay.leave = memory.leave
        forks = within.enter_context(_load_torch(command, nproc, relay))
        nproc = nproc or _gpus()
        rendezvous = _rendezvous(nproc, nodes, endpoints, rdzv_id, rdzv_timeout_s, last_call_s)
        while True:
            with _newcomers(rendezvous, file):
                agent = _agent(command, nproc, rendezvous, relay.handed_on, forks)
                code = _run(agent, relay, rendezvous)
            done = progress.read(file) if file is not None else progress.Progress()
            decision = supervisor.decide(code, done) if not relay.handed_on else None
            if decision is None or file is None:
                return code
            rendezvous.report_restart(line(decision, restarts, done.step))
            progress.write(file, progress.Progress())
            progress.write_request(file, progress.Request(decision.before))
            with relay.waiting():
                time.sleep(decision.wait_s)


def _load_torch(
    command: Sequence[str], nproc: int | None, relay: _Relay
) -> contextlib.AbstractContextManager[ForkServer | None]:
    """Load torch, then begin to handle signals. Return the process that forks ranks, or an empty
    context if the ranks cannot be forks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    spare_threads(nproc or 1)
    import torch  # noqa: F401

    forks = ForkServer(relay.restore) if can_fork(command) else contextlib.nullcontext()
    relay.listen()
    return forks


@contextlib.contextmanager
def _progress_file(restarts: int) -> Iterator[Path | None]:
    """Yield the file in which the run records its progress; None if no restarts are allowed."""
    progress.from_environment(
        os.environ
    )  # drop the variable that an outer job's launcher has set for its own ranks
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


def _rendezvous(
    nproc: int,
    nodes: NodeRange,
    endpoints: Sequence[Endpoint],
    rdzv_id: str,
    rdzv_timeout_s: float,
    last_call_s: float,
) -> ElasticRendezvous:
    """Return this launcher's side of the rendezvous of all nodes."""
    allow_connections(2 * nodes.most * nproc)  # to the store; ranks inherit the limit
    spare_threads(nproc)
    from megapipe.launch.elastic_rendezvous import ElasticRendezvous

    logging.disable(logging.CRITICAL)  # the agent logs each signal and failure
    return ElasticRendezvous(
        endpoints, rdzv_id, nodes, reach_s=rdzv_timeout_s, last_call_s=last_call_s
    )


@contextlib.contextmanager
def _newcomers(rendezvous: ElasticRendezvous, file: Path | None) -> Iterator[None]:
    """While the body runs, ask the run to stop when new nodes wait to join the job. The launcher
    with index 0 asks for all, by a request in `file`."""
    over = threading.Event()

    def look() -> None:
        while file is not None and not over.wait(NEWCOMERS_S):
            if rendezvous.node_index == 0 and rendezvous.nodes_waiting() and not over.is_set():
                asked = progress.read_request(file)
                progress.write_request(file, asked._replace(regroup=1))
                return

    if rendezvous.nodes.elastic:
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _agent(
    command: Sequence[str],
    nproc: int,
    rendezvous: ElasticRendezvous,
    handed_on: Container[int],
    forks: ForkServer | None,
) -> Agent:
    """Return torchrun's agent for one start of the job."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from megapipe.launch.agent import Agent

    spec = WorkerSpec(
        role="megapipe",
        local_world_size=nproc,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-u", *command),
        max_restarts=0,
        monitor_interval=MONITOR_S,
    )
    # the agent's own handler would end the ranks: give it a signal that nobody sends
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    return Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), handed_on=handed_on, forks=forks)


def _run(agent: Agent, relay: _Relay, rendezvous: ElasticRendezvous) -> int:
    """Start the ranks, wait for their end, and return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    group = agent.get_worker_group()
    relay.pids = lambda: [worker.id for worker in group.workers if worker.id]
    ends = RankReaper(relay.pids, lambda: agent.has_failed, lambda: agent.has_noticed, relay.leave)
    ends.start()
    try:
        result = agent.run()
    except (RendezvousError, DistError, TimeoutError) as error:
        raise LaunchError(
            f"the rendezvous failed at {rendezvous.endpoints_text}: {error}"
        ) from None
    finally:
        ends.over.set()
    return _exit_code(result, relay, ends.killed, agent.before)


def _exit_code(
    result: RunResult, relay: _Relay, stopped: Container[int], before: int | None
) -> int:
    """Return the exit code of the job on this node. Print an error if no rank could print it: a
    rank was killed, or a signal stopped it before it had begun.

    `before`: exit code of a failure that another process has claimed earlier. That code is returned
    instead, and nothing is printed. `stopped`: process ids of suspended ranks that the launcher
    killed because they could not end; these ranks have not failed themselves.
    """
    failures = sorted(result.failures.items(), key=lambda failure: failure[1].pid in stopped)
    for rank, failure in failures:  # ranks that were stopped come last: the agent ended them
        if failure.exitcode > 0:
            return failure.exitcode
        number = -failure.exitcode
        if number == signal.SIGKILL and relay.killed_for is not None:
            return 128 + relay.killed_for
        if number in relay.handed_on and number in STOPPED:  # too early to be handled
            if before is not None:  # a scheduler ends this launcher after another
                return before
            print_error(_stopped(signal.Signals(number), "before the ranks started"))
            return Preempted.exit_code
        if number not in relay.handed_on:
            if before is not None:
                return before
            if failure.pid in stopped:
                error = LaunchError(
                    f"rank {rank} is stopped by a signal, and the job ended without it"
                )
                print_error(error)
                return error.exit_code
            _report_killed(rank, signal.Signals(number))
        return 128 + number
    return 0


class _Relay(Listener):
    """Passes signals on to the ranks. After a second SIGINT or SIGTERM it kills remaining ranks."""

    def __init__(self) -> None:
        self.handed_on: set[int] = set()
        self.killed_for: int | None = None
        """Number of the second signal, if ranks were killed as they did not end after it."""
        self.pids: Callable[[], list[int]] = list
        """Function that returns the process ids of the ranks."""
        self.leave: Callable[[int], object] = os._exit
        """Function that ends this process at once with an exit code."""
        self._when = "before the ranks started"
        """Time without ranks, in words for messages: before the first start, or between starts."""
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
        """After the body, when the exit code is known, ignore signals if the caller `ends` this
        process with the code."""
        try:
            yield
        finally:
            if ends:
                self.ignore()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the time of the body as a wait between two starts."""
        self.pids, self._when = list, "while it waited for a restart"
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


def _report_killed(rank: int, number: signal.Signals) -> None:
    """Print the error of a rank that was killed and so could not print the error itself."""
    hint = "; the system does this when memory runs out" if number == signal.SIGKILL else ""
    print_error(LaunchError(f"rank {rank} was killed by {number.name}{hint}"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options."""
    own = sys.argv[0]  # the console command `megapipe launch`
    top = argparse.ArgumentParser(
        prog=own if own.startswith("megapipe ") else "python -m megapipe.launch",
        description="Start the processes of a job on this node and exit with their exit code.",
        usage="%(prog)s [options] PROGRAM.py [arguments]\n"
        "       %(prog)s [options] -m MODULE [arguments]",
        allow_abbrev=False,
    )
    top.add_argument(
        "--nproc", "--nproc-per-node", type=int, metavar="N",
        help="processes on this node (default: its number of GPUs, or 1)",
    )  # fmt: skip
    top.add_argument(
        "--nnodes", type=_value(NodeRange.read, "N or MIN:MAX"), default=ONE_NODE, metavar="N",
        help="nodes (default 1); MIN:MAX: start and continue with any number of nodes in "
            "this range",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-endpoint", type=_value(Endpoint.read, "HOST:PORT"), default=[],
        metavar="HOST:PORT[,HOST:PORT]", dest="endpoints",
        help="address of the rendezvous store, on one of the nodes; needed for several "
            "nodes. Of several endpoints, separated by commas, the first that works is "
            "used: the job survives the loss of the other nodes",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="name of the job, equal on all nodes; needed for several nodes",
    )
    top.add_argument(
        "--max-restarts", type=int, metavar="N",
        help="restart a run that a fault has ended, from its newest checkpoint, at most N times in "
        "a row without progress; after two faults at the same step from an older one. Default "
        f"0, as most first errors are mistakes; {ELASTIC_RESTARTS} with --nnodes MIN:MAX",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-timeout", type=int, default=RDZV_TIMEOUT_S, metavar="SECONDS",
        help=f"how long to try to reach --rdzv-endpoint (default {RDZV_TIMEOUT_S})",
    )  # fmt: skip
    top.add_argument(
        "--rdzv-last-call", type=int, default=LAST_CALL_S, metavar="SECONDS",
        help="how long to wait for further nodes after MIN have arrived "
        f"(default {LAST_CALL_S})",
    )  # fmt: skip
    top.add_argument(
        "--verdict", type=Path, metavar="FILE",
        help="write the job's exit code to FILE, unless it is 0 or another launcher of the job has "
        "written a code: the first launcher to end knows the cause (a scheduler ends the others)",
    )  # fmt: skip
    return top


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    options, command = _split(argv)
    own = parser()
    options, lines = with_new_options(options, own._option_string_actions)
    for notice in lines:
        print(f"megapipe: {notice}", file=sys.stderr)
    arguments = own.parse_args(options)
    if not command:
        own.error("no program: expected PROGRAM.py or -m MODULE")
    nodes = arguments.nnodes
    numbers = (arguments.rdzv_timeout, arguments.rdzv_last_call, arguments.nproc)
    if any(number is not None and number < 1 for number in numbers):
        own.error("--nproc, --rdzv-timeout and --rdzv-last-call: expected a number >= 1")
    if arguments.max_restarts is None:
        arguments.max_restarts = ELASTIC_RESTARTS if nodes.elastic else 0
    if arguments.max_restarts < nodes.elastic:
        own.error(f"--max-restarts: expected a number >= {int(nodes.elastic)}")
    env_nodes = os.environ.get(NODES) or "1"
    if (
        nodes.most == 1
        and env_nodes not in ONE
        and not any(o.startswith("--nnodes") for o in options)
    ):
        own.error(f"{NODES}={env_nodes} is ignored: expected --nnodes {env_nodes}, or --nnodes 1")
    if nodes.most > 1 and not (arguments.endpoints and arguments.rdzv_id):
        own.error("several nodes need --rdzv-endpoint HOST:PORT and --rdzv-id ID to meet")
    return arguments, command


def nodes_of(options: Sequence[str]) -> NodeRange:
    """Return the range of the number of nodes, from a launcher's options."""
    nodes: NodeRange = parser().parse_args(options).nnodes
    return nodes


def _repeated(options: Sequence[str]) -> str:
    """Return the launcher's options with which the user can start this job again: all except
    --verdict, whose file belongs to this launcher."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--verdict")
    return shlex.join(own.parse_known_args(options)[1])


def _value(read: Callable[[str], T], form: str) -> Callable[[str], T]:
    """Return an argparse type that parses with `read`; `form` is the expected form in words."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {form}, not {text!r}") from None

    return value


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into the launcher's own options (``--name value`` or ``--name=value``) and the
    command."""
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
    """Write the exit code of the job to a file, unless another launcher has written a code there.

    The file may exist and be empty. On a network file system it should exist before the job: then
    all clients see its newest content, because the content is looked up when the file is opened.
    """
    try:
        with open(path, "a+") as file:
            file.seek(0)
            if not file.read():
                file.write(f"{code}\n")
    except OSError as error:
        print_error(LaunchError(f"--verdict {path}: {error.strerror}; the exit code is {code}"))


def main(argv: Sequence[str]) -> int:
    """Run the command in `argv` on this node. Return the exit code."""
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
            restarts=arguments.max_restarts,
            ends=True,
        )
    except MegapipeError as error:
        print_error(error)
        code = error.exit_code
    if arguments.verdict is not None and code:
        write_verdict(arguments.verdict, code)
    return code
