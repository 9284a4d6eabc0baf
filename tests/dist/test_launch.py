"""How processes find their info, compare notes, and leave; in threads and bare processes."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, PrefixStore, TCPStore

from megapipe.errors import ConfigError, DataError, LaunchError
from megapipe.launch import rendezvous, shutdown, stores
from megapipe.launch.launch_info import LaunchInfo, find_launch_info, first_host
from megapipe.launch.rendezvous import RendezvousError
from megapipe.launch.shutdown import Shutdown
from megapipe.text import ranges
from tests.parity import threads
from tests.parity.jobs import free_port
from tests.parity.tiers import in_parts

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}


def test_the_place_of_a_plain_process() -> None:
    info = find_launch_info({"PATH": "/bin", "SLURM_JOB_ID": "7"})
    assert info == LaunchInfo()
    assert (info.rank, info.world, info.launched) == (0, 1, False)
    assert not info.hosts


def test_the_place_under_torchrun() -> None:
    info = find_launch_info(TORCHRUN)
    assert info == LaunchInfo(9, 16, 1, 8, "node0", 1234, launched=True, hosted=True)
    assert not info.ended_by_launcher
    told = {"MEGAPIPE_LAUNCH_OPTIONS": "--nproc 8 '--rdzv-id=a b'"}
    assert find_launch_info(TORCHRUN | told).options == ("--nproc", "8", "--rdzv-id=a b")
    assert find_launch_info(SLURM | told).options is None, "srun within it is another launcher"
    one_node = find_launch_info(
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "16"}
    )
    assert one_node.ended_by_launcher
    assert not one_node.hosts


def test_the_place_by_hand() -> None:
    info = find_launch_info({"RANK": "0", "WORLD_SIZE": "2"})
    assert info == LaunchInfo(0, 2, 0, 2, launched=True, guessed=("local_rank", "local_world"))
    assert info.hosts
    assert not info.ended_by_launcher


POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
"""What a PyTorchJob of Kubeflow tells its worker; the master is told localhost."""


def test_the_place_in_a_pod() -> None:
    """Nothing tells which ranks share a host: a process for each is guessed."""
    guessed = ("local_rank", "local_world")
    worker = LaunchInfo(1, 2, 0, 1, "job-master-0", 23456, launched=True, guessed=guessed)
    assert find_launch_info(POD) == worker
    given = find_launch_info({**POD, "LOCAL_RANK": "0"})
    assert given == replace(worker, guessed=("local_world",))
    assert find_launch_info({**POD, "PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"}) == worker
    first = POD | {"RANK": "0", "MASTER_ADDR": "localhost"}
    by_hand = replace(worker, rank=0, local_world=2, address="localhost")
    assert find_launch_info(first) == by_hand
    master = find_launch_info(first | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert master == replace(by_hand, local_world=1, kubernetes="10.0.0.1")


def test_the_place_under_srun() -> None:
    info = find_launch_info(SLURM)
    assert info == LaunchInfo(5, 8, 1, 4, "gpu03", 23456, launched=True)
    given = find_launch_info({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert (given.address, given.port, given.is_listed) == ("head", 99, False)
    under_torchrun = find_launch_info({**SLURM, **TORCHRUN})
    assert under_torchrun == find_launch_info(TORCHRUN)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"RANK": "16"}, "rank 16 does not exist in a world of 16"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_variables_that_make_no_sense(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_launch_info({**TORCHRUN, **wrong})


def test_a_slurm_job_number_that_is_none() -> None:
    with pytest.raises(LaunchError, match="SLURM_JOB_ID='seven'"):
        find_launch_info({**SLURM, "SLURM_JOB_ID": "seven"})


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_the_place_under_mpirun() -> None:
    here = LaunchInfo(3, 4, 3, 4, launched=True)
    assert find_launch_info(OPEN_MPI) == here
    # within SLURM mpirun's own processes, one per node, are the tasks of a step
    nodes = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert find_launch_info({**nodes, **OPEN_MPI}) == replace(here, port=23456)
    head = {"MASTER_ADDR": "head", "MASTER_PORT": "99"}
    two_nodes = replace(here, local_rank=1, local_world=2, address="head", port=99)
    assert find_launch_info({**HYDRA, **head}) == two_nodes
    assert find_launch_info({**OPEN_MPI, **TORCHRUN}) == find_launch_info(TORCHRUN)


@pytest.mark.parametrize("name", ["SLURM_JOB_NODELIST", "SLURM_NODELIST"])
def test_the_hosts_of_mpirun_in_an_allocation(name: str) -> None:
    """The step of its own processes is without the host on which mpirun runs, the first."""
    job = {"SLURM_JOB_ID": "123456", name: "gpu[01-02]", "SLURM_STEP_NODELIST": "gpu02"}
    spread = LaunchInfo(3, 4, 1, 2, "gpu01", 23456, launched=True, is_listed=True)
    assert find_launch_info({**job, **HYDRA}) == spread
    open_mpi = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    step = {**job, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launch_info({**step, **open_mpi}) == spread
    given = {**job, **HYDRA, "MASTER_ADDR": "head"}
    assert find_launch_info(given) == replace(spread, address="head", is_listed=False)


def test_the_place_under_srun_with_variables_of_mpi() -> None:
    assert find_launch_info({**SLURM, "PMIX_RANK": "5"}) == find_launch_info(SLURM)
    pmi2 = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}
    assert find_launch_info(pmi2) == find_launch_info(SLURM)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (HYDRA, "2 of 4 processes are on this host.*set MASTER_ADDR to it"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=''"),
        ({"PMI_SIZE": "4"}, "PMI_RANK=''"),
        ({"SLURM_PROCID": "2"}, "one of 1 SLURM tasks.*SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "one of 4 SLURM tasks.*start it with srun"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID is not set.*RANK=0 WORLD_SIZE=1"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 means several pods.*torchrun.*set RANK, WORLD"),
        ({"PET_NNODES": "1:3"}, "PET_NNODES=1:3 means several pods"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0 .*RANK=0 WORLD_SIZE=1"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 comes from a launcher.*set RANK, WORLD_SIZE"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_TASK_RANK=1 comes from a launcher"),
        ({**TORCHRUN, "MASTER_ADDR": "a..b"}, "MASTER_ADDR='a..b': expected the name or address"),
    ],
)
def test_a_process_of_several_that_cannot_tell_its_place(
    environ: dict[str, str], words: str
) -> None:
    """It would train the whole model alone, as each of the others would."""
    with pytest.raises(LaunchError, match=words):
        find_launch_info(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "0"},
        {"PET_NNODES": "1"},
        {"PET_NNODES": "1:1"},
    ],
)
def test_one_process_in_an_allocation(environ: dict[str, str]) -> None:
    """It may be salloc's shell, a batch script or a job of Kubeflow that has one task."""
    assert find_launch_info(environ) == LaunchInfo()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("login,gpu[03-05]", "login"),
        ("a-b7", "a-b7"),
        ("rack1-[001-002]", "rack1-001"),
        ("n[1-2]-ib", "n1-ib"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([5], "5"), ([2, 1], "1-2"), ([1, 2, 3, 7], "1-3, 7"), ([1, 3, 5], "1, 3, 5")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_differences_on_one_line() -> None:
    differences = [("b", 1, 2, rank) for rank in (3, 1, 2)]
    differences += [("b", 1, None, 7), ("a.x", "one", "two", 5)]
    assert rendezvous._describe(differences) == (
        "the ranks disagree: a.x is 'one' on rank 0 but 'two' on rank 5; "
        "b is 1 on rank 0 but 2 on ranks 1-3, None on rank 7"
    )


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not to end where a busy machine answers late."""
    monkeypatch.setattr(shutdown, "ANSWER_S", 60.0)
    monkeypatch.setattr(shutdown, "GRACE_S", 60.0)


@pytest.fixture
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def at_once(world: int, port: int, work: Callable[[LaunchInfo, PrefixStore], Any]) -> list[Any]:
    """Run `work` on ranks that meet in a store; return each one's result or exception."""

    def on_rank(rank: int) -> Any:
        info = LaunchInfo(rank, world, rank, world, port=port, hosted=True)
        return work(info, PrefixStore("x", TCPStore("127.0.0.1", port)))

    return threads.at_once(world, on_rank)


def test_ranks_that_agree(port: int) -> None:
    values = {"a": 1, "b": [None, 2.5], "c": "text"}
    found = at_once(4, port, lambda info, s: rendezvous.compare_ranks(s, info, values, 10))
    assert found == [None] * 4


def test_ranks_that_disagree(port: int) -> None:
    """Every rank gets the same message: a value that differs, one too many, one that lacks."""

    def compare(info: LaunchInfo, store: PrefixStore) -> None:
        values: dict[str, object] = {"same": 1, "lr": 0.1 if info.rank != 2 else 0.2}
        if info.rank in (1, 2):
            values["extra"] = True
        rendezvous.compare_ranks(store, info, values, 10)

    texts = {str(error) for error in at_once(4, port, compare)}
    (text,) = texts
    assert text == (
        "the ranks disagree: extra is None on rank 0 but True on ranks 1-2; "
        "lr is 0.1 on rank 0 but 0.2 on rank 2"
    )


def test_a_start_finds_nothing_of_the_one_before(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's agent keeps its store from one start to the next, and tells their number."""
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = rendezvous.open_store(LaunchInfo(1, 2, 1, 2, port=port, hosted=True), 10)
        found.append(store.check(["address"]))
        store.set("address", "of a process that has ended")
    assert found == [False, False]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late(port: int, late: int) -> None:
    """Ranks that wait for the values of rank 0 are not late."""

    def compare(info: LaunchInfo, store: PrefixStore) -> None:
        if info.rank != late:
            rendezvous.compare_ranks(store, info, {"a": 1}, 1)

    first, second = (error for error in at_once(3, port, compare) if error is not None)
    assert isinstance(first, LaunchError)
    assert str(first) == str(second)
    assert str(first).startswith(
        f"2 of 3 ranks arrived within 1 s (parallel.timeout_s), and not rank {late}: "
    )


def test_a_port_that_something_else_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own client would wait for an answer for ever."""
    monkeypatch.setattr(stores, "ANSWER_S", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        info = LaunchInfo(1, 2, 1, 2, port=other.getsockname()[1], launched=True)
        with pytest.raises(RendezvousError, match="not a rendezvous store"):
            rendezvous.open_store(info, 60)
        with pytest.raises(RendezvousError, match="the port is in use"):
            rendezvous.open_store(replace(info, rank=0), 60)
        assert not shutdown.may_print_alone(info), "rank 0 reports it"
    assert shutdown.may_print_alone(info)
    assert not shutdown.may_print_alone(replace(info, rank=2, local_rank=2))
    assert shutdown.may_print_alone(replace(info, rank=8, local_rank=0))


def captured(work: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `work`, and what all threads wrote to standard error."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        result = work()
    return result, text.getvalue()


def test_of_all_that_fail_at_once_one_speaks(port: int) -> None:
    def fail(info: LaunchInfo, store: PrefixStore) -> int:
        return Shutdown(info, store).report(DataError(f"bad\nrank {info.rank}"))

    codes, text = captured(lambda: at_once(6, port, fail))
    assert codes == [3] * 6
    assert text.startswith("megapipe: error: bad rank ")
    assert text.count("\n") == 1


def test_of_a_bug_one_traceback_is_shown(port: int) -> None:
    def fail(info: LaunchInfo, store: PrefixStore) -> int:
        end = Shutdown(info, store)
        try:
            raise ZeroDivisionError(f"on rank {info.rank}")
        except ZeroDivisionError as error:
            return end.report_unexpected(error)

    codes, text = captured(lambda: at_once(3, port, fail))
    assert codes == [1] * 3
    assert text.count("Traceback") == 1
    assert text.count("ZeroDivisionError: on rank") == 1


@pytest.mark.full
def test_a_lost_peer_is_news_only_if_it_did_not_say_why(port: int) -> None:
    broken = RuntimeError("[/x/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    said = threading.Event()

    def fail(info: LaunchInfo, store: PrefixStore) -> int:
        end = Shutdown(info, store)
        if info.rank == 1:
            code = end.report(ConfigError("why"))
            said.set()
            return code
        assert said.wait(10)
        return end.report_unexpected(broken)

    codes, text = captured(lambda: at_once(3, port, fail))
    assert codes == [2] * 3
    assert text == "megapipe: error: why\n"

    def lose(info: LaunchInfo, store: PrefixStore) -> int:
        end = Shutdown(info, PrefixStore("another job", store))
        return end.report_unexpected(broken)

    codes, text = captured(lambda: at_once(3, port, lose))
    assert codes == [4] * 3
    assert text.count("\n") == 1
    assert "lost contact with a peer: Connection closed by peer [127.0.0.1]:1" in text


def stuck(port: int, path: str, timeout_s: float) -> None:
    """Run a rank that is inside something that notices nothing."""
    info = LaunchInfo(1, 2, 0, 1, port=port, hosted=True)
    with open(path, "w") as sys.stderr:
        end = Shutdown(info, rendezvous.open_store(info, 10), timeout_s=timeout_s)
        end.cleanup = lambda: print("cleaned up", file=sys.stderr, flush=True)
        time.sleep(60)


class Link:
    """Carries what a store is told and answers until it is `cut`; then nothing passes, though no
    connection is closed."""

    def __init__(self, server: int) -> None:
        self.cut = False
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(("127.0.0.1", self._server))
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._hand_on, args=pair, daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.cut:
                    sink.sendall(data)


@in_parts("loss", ["a word", "gone", "mute"], full=["gone"])
def test_a_rank_that_is_stuck_ends_with_the_job(tmp_path: Any, loss: str) -> None:
    """When a peer fails with a word, when the store goes down, and when it answers nobody."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = Link(server.port)
    port = link.port if loss == "mute" else server.port
    context = multiprocessing.get_context("forkserver")
    file = tmp_path / "stderr"
    timeout_s = 1.0 if loss == "mute" else 30.0  # a server takes its time to close
    process = context.Process(target=stuck, args=(port, str(file), timeout_s), daemon=True)
    process.start()
    info = LaunchInfo(0, 2, 0, 2, port=port, hosted=True)
    while not file.exists():
        time.sleep(0.05)
    time.sleep(1.0)
    link.cut = True
    if loss == "gone":
        del server
    elif loss == "a word":
        _, text = captured(
            lambda: Shutdown(info, rendezvous.open_store(info, 10)).report(DataError("why"))
        )
        assert text == "megapipe: error: why\n"
    process.join(20)
    assert process.exitcode == (3 if loss == "a word" else 4)
    lost = {
        "a word": "",
        "gone": f"megapipe: error: rank 1 lost the rendezvous store at 127.0.0.1:{port}\n",
        "mute": f"megapipe: error: rank 1 lost the rendezvous store at 127.0.0.1:{port}: no answer "
        "for 1 s (by parallel.timeout_s)\n",
    }
    assert file.read_text() == f"{lost[loss]}cleaned up\n"


def test_the_host_of_the_store_leaves_last() -> None:
    port = free_port()
    left: list[int] = []

    def rank_main(rank: int) -> None:
        info = LaunchInfo(rank, 3, rank, 3, port=port, launched=True)
        end = Shutdown(info, rendezvous.open_store(info, 10))
        time.sleep(0.3 * rank)
        end.leave()
        left.append(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert left[0] == 1
    assert sorted(left[1:]) == [0, 2]


def test_a_store_that_is_gone_is_a_network_error() -> None:
    """What :class:`Shutdown` tells apart from a quiet hour."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port)
    del server
    with pytest.raises(DistNetworkError):
        client.wait(["nothing"])
