"""Monitors of several nodes tell one what they see."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from megapipe.watch import monitor_link
from megapipe.watch.hang_diagnosis import RankView
from megapipe.watch.journal import JournalState
from megapipe.watch.monitor_link import MonitorClient, MonitorServer

VIEW = RankView(
    JournalState(7, 9, 3, "F", "pp 0", {"a": 2}, "a", 2, (0, 1), False), 4.0, 0.1, False, "node1"
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> tuple[MonitorServer, tuple[str, int]]:
    monkeypatch.setattr(monitor_link, "EVERY_S", 0.0)
    listens = socket.create_server(("127.0.0.1", 0))
    address = listens.getsockname()
    return MonitorServer(listens.detach(), "a word"), address


def soon(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + 30.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


def test_views_arrive_and_the_verdict_comes_back(
    hub: tuple[MonitorServer, tuple[str, int]],
) -> None:
    here, address = hub
    spokes = [MonitorClient(address, "a word") for _ in range(2)]
    for number, spoke in enumerate(spokes):
        assert spoke.exchange({number: VIEW}) is None
    assert here.views().keys() == {0, 1}
    seen = here.views()[1]
    assert seen.state == VIEW.state._replace(waits_for=[0, 1])  # type: ignore[arg-type]
    assert 4.0 <= seen.still_s < 34.0
    assert seen.host == "node1"
    here.set_answer(None, {7: VIEW})
    assert [spoke.exchange({}) for spoke in spokes] == [None] * 2
    assert spokes[0].views()[7].host == "node1", "of the node of the one that decides"
    here.set_answer("it is rank 1", {})
    assert [spoke.exchange({}) for spoke in spokes] == ["it is rank 1"] * 2
    here.await_all()
    assert not here.is_asked
    assert not here.views()


def test_lost_contact_is_told_at_once(
    hub: tuple[MonitorServer, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, address = hub
    monkeypatch.setattr(monitor_link, "EVERY_S", 60.0)
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    spoke.exchange({6: VIEW})
    assert here.views().keys() == {5}
    state = VIEW.state._replace(lost_contact=True)
    spoke.exchange({5: VIEW, 6: VIEW._replace(state=state)})
    assert here.views()[6].state.lost_contact


def test_a_stranger_is_not_heard(hub: tuple[MonitorServer, tuple[str, int]]) -> None:
    here, address = hub
    stranger = MonitorClient(address, "another word")
    assert stranger.exchange({5: VIEW}) is None
    assert not stranger.is_connected
    assert not here.views()


def test_the_last_words_of_a_monitor_are_kept(hub: tuple[MonitorServer, tuple[str, int]]) -> None:
    """The monitor's ranks may be gone, and it ends with them."""
    here, address = hub
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    assert not here.views()[5].unheard
    assert here.is_asked
    spoke.exchange({5: VIEW._replace(gone=True)}, at_once=True)
    assert spoke._connection is not None
    spoke._connection.close()
    spoke._answers.close()
    assert soon(lambda: here.views()[5].unheard)
    assert here.views()[5].gone
    assert not here.is_asked


def test_a_node_that_is_silent(
    hub: tuple[MonitorServer, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's connection stays open."""
    here, address = hub
    here.set_answer(None, {2: VIEW})
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    assert not here.views()[5].unheard
    monkeypatch.setattr(monitor_link, "SILENT_S", 0.0)
    assert here.views()[5].unheard
    assert spoke.views()[2].unheard
    assert not here.is_asked


def test_time_counts_in_which_the_monitor_runs(hub: tuple[MonitorServer, tuple[str, int]]) -> None:
    """A job that was suspended as a whole has heard nothing meanwhile."""
    here, address = hub
    here.set_answer(None, {2: VIEW})
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    for side, rank in ((here, 5), (spoke, 2)):
        side.look(1.0)
        seen = side.views()[rank]
        assert (seen.still_s, seen.unheard) == (5.0, False)
        assert seen.beatless_s == pytest.approx(1.1)
        side.look(monitor_link.SILENT_S)
        assert side.views()[rank].unheard


def test_one_that_is_lost_is_tried_again(hub: tuple[MonitorServer, tuple[str, int]]) -> None:
    here, address = hub
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    assert spoke._connection is not None
    spoke._connection.shutdown(socket.SHUT_RDWR)
    assert spoke.exchange({5: VIEW}) is None
    assert soon(lambda: here.views()[5].unheard)
    spoke.look(0.25)
    assert not spoke.is_connected, "not at once: it may take its time to fail"
    spoke._due = 0.0
    spoke.look(0.25)
    assert spoke.is_connected
    spoke.exchange({6: VIEW})
    assert [(rank, view.unheard) for rank, view in here.views().items()] == [(6, False)]


def test_the_node_of_the_one_that_decides_is_lost(
    hub: tuple[MonitorServer, tuple[str, int]],
) -> None:
    here, address = hub
    here.set_answer(None, {2: VIEW})
    spoke = MonitorClient(address, "a word")
    spoke.exchange({5: VIEW})
    assert not spoke.views()[2].unheard
    here.set_answer("it ends the connection", {})
    assert spoke.exchange({5: VIEW}) is not None
    assert spoke.exchange({5: VIEW}) is None
    assert not spoke.is_connected
    spoke = MonitorClient(address, "another word")
    assert not spoke.views(), "nothing was ever told"


def test_without_a_hub_each_decides_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not MonitorClient(free.getsockname(), "a word").is_connected
