"""Launchers in threads of one process, which meet in real stores."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from megapipe.launch import elastic_rendezvous as module
from megapipe.launch.elastic_rendezvous import ElasticRendezvous
from megapipe.launch.endpoints import Endpoint, NodeRange
from tests.parity.jobs import free_port


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.02), ("FRESH_S", 0.4), ("DEAD_S", 0.6), ("TURN_S", 0.5)):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def endpoint() -> list[Endpoint]:
    return [Endpoint("localhost", free_port())]


def node(
    endpoints: Sequence[Endpoint],
    nodes: NodeRange,
    *,
    last_call_s: float = 0.3,
    reach_s: float = 10,
) -> ElasticRendezvous:
    return ElasticRendezvous(endpoints, "job", nodes, reach_s=reach_s, last_call_s=last_call_s)


class Coming(threading.Thread):
    """A launcher that takes part in the next round."""

    def __init__(self, meeting: ElasticRendezvous) -> None:
        super().__init__(daemon=True)
        self.meeting = meeting
        self.info: RendezvousInfo | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self.meeting.next_rendezvous()
        except Exception as error:
            self.error = error


def all_come(*meetings: ElasticRendezvous) -> list[RendezvousInfo]:
    """Return what each rendezvous is told if all come at once."""
    return told(*[Coming(meeting) for meeting in meetings])


def told(*coming: Coming) -> list[RendezvousInfo]:
    infos = []
    for thread in coming:
        thread.join(20)
        assert thread.info is not None, thread.error
        infos.append(thread.info)
    return infos


def gone(call: object) -> NoReturn:
    """Raise in place of a rendezvous' request to the store: its node has ended."""
    raise RuntimeError("gone")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_one_start(infos: list[RendezvousInfo]) -> None:
    """Assert that they have different places and share a store."""
    assert sorted(info.rank for info in infos) == [*range(len(infos))]
    assert {info.world_size for info in infos} == {len(infos)}
    infos[0].store.set("of this start", "1")
    assert all(info.store.check(["of this start"]) for info in infos)
    places = [info.bootstrap_store_info for info in infos]
    assert len({(place.master_addr, place.master_port) for place in places if place}) == 1


def test_one_node_needs_no_meeting() -> None:
    (info,) = all_come(node([], NodeRange()))
    assert (info.rank, info.world_size) == (0, 1)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_all_nodes_come(count: int, endpoint: list[Endpoint]) -> None:
    assert_one_start(all_come(*(node(endpoint, NodeRange(count, count)) for _ in range(count))))


def test_starts_share_no_store_and_keep_the_order(endpoint: list[Endpoint]) -> None:
    meetings = [node(endpoint, NodeRange(3, 3)) for _ in range(3)]
    first = all_come(*meetings)
    first[0].store.set("stale", "1")
    second = all_come(*reversed(meetings))
    assert_one_start(second)
    assert not second[0].store.check(["stale"])
    assert [info.rank for info in reversed(second)] == [info.rank for info in first]


def test_another_job_at_the_same_store(endpoint: list[Endpoint]) -> None:
    """A job is started anew while launchers of the last one are still ending."""
    old = [node(endpoint, NodeRange(2, 2)) for _ in range(2)]
    all_come(*old)
    new = [
        ElasticRendezvous(endpoint, "new", NodeRange(2, 2), reach_s=10, last_call_s=1)
        for _ in range(2)
    ]
    assert_one_start(all_come(*new))


def test_fewer_than_the_most(endpoint: list[Endpoint]) -> None:
    began = time.monotonic()
    meetings = [node(endpoint, NodeRange(2, 4), last_call_s=1) for _ in range(3)]
    assert_one_start(all_come(*meetings))
    assert time.monotonic() - began >= 1, "it waits for the fourth"
    assert all(meeting.members == 3 for meeting in meetings)


def test_a_node_that_comes_late(
    endpoint: list[Endpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    first = [node(endpoint, NodeRange(1, 2)), node(endpoint, NodeRange(1, 2))]
    all_come(first[0])
    assert first[0].nodes_waiting() == 0
    late = Coming(first[1])
    until(lambda: first[0].nodes_waiting() == 1)
    assert late.is_alive()
    until(lambda: "1 node of 1:2 run the job already" in capsys.readouterr().err)
    (info,) = all_come(first[0])
    assert_one_start([info, *told(late)])
    assert info.rank == 0, "who was there stays first"
    assert first[0].nodes_waiting() == 0


def test_a_late_node_that_goes_again(endpoint: list[Endpoint]) -> None:
    here, other = node(endpoint, NodeRange(1, 2)), node(endpoint, NodeRange(1, 2))
    all_come(here)
    late = Coming(other)
    until(lambda: here.nodes_waiting() == 1)
    other._ask = gone  # type: ignore[method-assign]
    until(lambda: here.nodes_waiting() == 0)
    late.join(5)
    assert not late.is_alive()
    (info,) = all_come(here)
    assert info.world_size == 1


def test_a_full_job_takes_nobody_in(endpoint: list[Endpoint]) -> None:
    here = node(endpoint, NodeRange(1, 1 + 1))
    other = node(endpoint, NodeRange(1, 2))
    all_come(here, other)
    third = node(endpoint, NodeRange(1, 2))
    late = Coming(third)
    time.sleep(0.5)
    assert here.nodes_waiting() == 0
    third._ask = gone  # type: ignore[method-assign]
    late.join(5)


def test_a_node_that_dies_while_others_wait(endpoint: list[Endpoint]) -> None:
    """It had the lowest ticket, and would have closed the round."""
    dying = node(endpoint, NodeRange(2, 2))
    dying._pulses.give = lambda here, ticket: None  # type: ignore[method-assign]
    dying._store = dying._enter()
    assert dying._ask(lambda store: store.compare_set("round", "", "1")) == b"1"
    assert dying._ask(lambda store: store.add("1/arrived", 1)) == 1
    assert_one_start(all_come(*(node(endpoint, NodeRange(2, 2)) for _ in range(2))))


@contextlib.contextmanager
def tells_the_time(words: str) -> Iterator[None]:
    """Look for no longer than is said, which is as long as was asked for: half a second."""
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=words) as caught:
        yield
    took = time.monotonic() - began
    assert took < 2, "a busy machine included"
    if (said := re.search(r"for ([\d.]+) s", str(caught.value))) is not None:
        assert 0.5 <= float(said[1]) <= took + 0.05


def test_nobody_is_there() -> None:
    nowhere = node([Endpoint("192.0.2.1", 29400)], NodeRange(2, 2), reach_s=0.5)
    with tells_the_time("no store answers there for"):
        nowhere.next_rendezvous()


def test_something_else_listens_there() -> None:
    """It takes connections and never answers, at each of the endpoints."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        mute = Endpoint("127.0.0.1", other.getsockname()[1])
        with tells_the_time("no store answers there for"):
            node([mute] * 3, NodeRange(2, 2), reach_s=0.5).next_rendezvous()


def test_a_name_that_is_looked_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def ask(*given: Any, **more: Any) -> NoReturn:
        over.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    try:
        with tells_the_time("this host cannot resolve nowhere.invalid"):
            node(
                [Endpoint("nowhere.invalid", 1)] * 2, NodeRange(2, 2), reach_s=0.5
            ).next_rendezvous()
    finally:
        over.set()


def test_a_name_that_nobody_knows_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is looked for, as a cluster may give it to a node that starts late."""
    known = socket.getaddrinfo

    def ask(host: str, *given: Any, **more: Any) -> Any:
        if host == "nowhere.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    nowhere = node([Endpoint("nowhere.invalid", 29400)], NodeRange(2, 2), reach_s=0.5)
    with pytest.raises(
        RendezvousConnectionError, match=r"this host cannot resolve nowhere.invalid$"
    ):
        nowhere.next_rendezvous()
    assert capsys.readouterr().err == (
        "megapipe: this host cannot resolve nowhere.invalid (--rdzv-endpoint); trying for 0.5 "
        "s, as a name may appear late\n"
    )


def test_one_node_meets_at_its_own_address() -> None:
    assert node([], NodeRange(1, 1)).endpoints_text.startswith("localhost")


def test_too_few_come(endpoint: list[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_S", 0.5)
    with pytest.raises(RendezvousTimeoutError, match=r"fewer than 2 nodes came within 0\.5 s"):
        node(endpoint, NodeRange(2, 2)).next_rendezvous()


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """Return two endpoints; a node is at the one that its thread is named after."""

    def is_here(host: str) -> bool:
        return threading.current_thread().name == host

    monkeypatch.setattr(module, "is_here", is_here)
    return [Endpoint("127.0.0.1", free_port()), Endpoint("127.0.0.2", free_port())]


def test_the_loss_of_the_node_that_hosts_the_meeting(
    two_hosts: list[Endpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    def coming(meeting: ElasticRendezvous, host: str) -> Coming:
        thread = Coming.__new__(Coming)
        threading.Thread.__init__(thread, daemon=True, name=host)
        thread.meeting, thread.info, thread.error = meeting, None, None
        thread.start()
        return thread

    first, second = (node(two_hosts, NodeRange(1, 2), last_call_s=s) for s in (10, 0.3))
    joined = second._joined
    second._joined = (  # type: ignore[method-assign]
        lambda *given: joined(*given) if first._round else None
    )
    assert_one_start(told(coming(second, "127.0.0.2"), coming(first, "127.0.0.1")))
    assert first._at == second._at == two_hosts[0], "the second leaves it to the first"
    first._store = None  # its launcher has ended
    second.report_restart("news")
    assert "news" not in capsys.readouterr().err, "the first node says it"
    (info,) = told(coming(second, "127.0.0.2"))
    assert capsys.readouterr().err == "megapipe: news\n", "that is gone"
    assert (info.world_size, second._at) == (1, two_hosts[1])
    again = node(two_hosts, NodeRange(1, 2))
    late = coming(again, "127.0.0.1")
    until(lambda: second.nodes_waiting() == 1)
    assert_one_start(told(late, coming(second, "127.0.0.2")))
    assert again._at == two_hosts[1], "a node that comes back finds the others"
