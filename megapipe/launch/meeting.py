"""How the launchers of several nodes agree who takes part in a start of the job.

One of them hosts a store at an endpoint that all are given. Each start of the job is a round in it:
who comes takes a ticket and gives signs of life, and the one with the lowest ticket of those alive
closes the round, when all nodes are there, or when the least number is and no other has come for a
while. It hosts a store of this start alone, in which the ranks find nothing of the starts before.
Who comes late waits for the next round. No clocks are compared, and none of this is asked for once
the ranks have been started, so that a job does not depend on the store of the meeting.

With several endpoints any of these nodes may be lost: those that are left look for a meeting at
each, and open one at the first that is theirs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from megapipe.errors import LaunchError
from megapipe.launch.endpoints import Endpoint, NodeRange
from megapipe.launch.listening import (
    STORE,
    Tell,
    is_here,
    listen,
    listen_beside,
    local_address,
    loopback_hint,
)
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.stores import ANSWER_S, open_tcp_store
from megapipe.util import heartbeat
from megapipe.util.answers import NoAnswer, call_with_timeout
from megapipe.words import count_noun

LOOK_S = 0.25
"""Time between two signs of life, and between two looks at those of others."""
FRESH_S = 1.5
"""A node that is taken into a start has given a sign of life within this time."""
DEAD_S = 5.0
"""A node that has given no sign of life for so long is gone."""
TURN_S = 5.0
"""How long the node of each endpoint leaves it to that of the one before to open the meeting."""
LEAST_S = 0.05
"""The shortest time that an attempt gets."""
REACH_S = 2.0
"""How long it may take to connect to an endpoint."""
JOIN_S = 600.0
"""How long the least number of nodes may take to come."""
TELL_S = 10.0
"""Who waits longer for others says so."""
T = TypeVar("T")


class ElasticRendezvous(RendezvousHandler):
    """The rounds of a job named `job`, as one of its launchers takes part in them.

    `reach_s` is how long to look for the store, `last_call_s` how long to wait for more nodes than
    the least number. Errors are torch's RendezvousError.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        job: str,
        nodes: NodeRange,
        *,
        reach_s: float,
        last_call_s: float,
    ) -> None:
        self.nodes = nodes
        self.members = 0
        """How many nodes take part in the last round."""
        self._endpoints = endpoints
        self._job = job
        self._reach_s = reach_s
        self._last_call_s = last_call_s
        self._store: Store | None = None
        self._at = endpoints[0] if endpoints else Endpoint("localhost", 0)
        self._round = 0
        self._tickets: list[int] = []
        """Those of the last round's members, in order."""
        self.place: int | None = None
        """This node's among them: its number in the order of the nodes."""
        self._pulses = _Pulses(self._ask)
        self._news = ""
        self._doubts: set[str] = set()
        """Lines on where stores listen that the user has been told."""

    @property
    def where(self) -> str:
        """The endpoints, as they are given, or this host where there is one node."""
        return ",".join(map(str, self._endpoints)) or "localhost, its own loopback address"

    def get_backend(self) -> str:
        return "megapipe"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Return 0: torchrun's agent is to end no ranks for a node that comes; see
        :meth:`nodes_waiting`."""
        return 0

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; returns its store, and this node's place among the nodes."""
        if self.nodes.most == 1:
            self.members, self.place = 1, 0
            if (problem := loopback_problem()) is not None:
                raise LaunchError(problem)
            here = Endpoint("localhost", 0)
            return _info(*_host_store(here, self._reach_s, self._doubt), 0, 1)
        while True:
            try:
                self._store = self._store or self._enter()
                info = self._take_part()
            except (DistError, NoAnswer):  # its host has ended or cannot be reached
                self._store, self._round = None, 0
                self._pulses = _Pulses(self._ask)  # rounds of another store have the same numbers
            else:
                if info is not None:
                    self._say(self._news)
                    self._news = ""
                    return info

    def tell(self, news: str) -> None:
        """A line for the user from the first node: from that of the next round if that of the last
        one is gone."""
        self._news = "" if self.place == 0 else news
        self._say(news)

    def _say(self, news: str) -> None:
        if news and self.place == 0:
            heartbeat.print_notice(news)

    def _doubt(self, line: str) -> None:
        """Tell a line on where a store listens, of several stores once."""
        if line not in self._doubts:
            self._doubts.add(line)
            heartbeat.print_notice(line)

    def nodes_waiting(self) -> int:
        """How many nodes wait for the next round, of which some could be taken in now.

        To be asked by one of the members, while the ranks are running.
        """
        if self.members == self.nodes.most or self._store is None:
            return 0
        with contextlib.suppress(DistError, NoAnswer):
            arrived = self._ask(lambda store: store.add(f"{self._round}/arrived", 0))
            late = {*range(1, arrived + 1)} - {*self._tickets}
            return sum(self._pulses.fresh(self._round, ticket) for ticket in late)
        return 0

    def _enter(self) -> Store:
        """A connection to the store of the meeting, which this node may open."""
        began, told = time.monotonic(), False

        def waited() -> float:
            return time.monotonic() - began

        def left() -> float:
            return max(self._reach_s - waited(), LEAST_S)

        while True:
            unknown = self._unknown(left)
            store = self._joined(unknown, left) or self._opened(unknown, waited())
            if store is not None:
                return PrefixStore(f"megapipe/{self._job}", store)
            if unknown and not told:
                told = True
                heartbeat.print_notice(
                    f"this host knows no {' and no '.join(unknown)} (--rdzv-endpoint); looking for "
                    f"{self._reach_s:g} s, as names may come late"
                )
            if waited() >= self._reach_s:
                raise RendezvousConnectionError(
                    f"this host knows no {' and no '.join(unknown)}"
                    if unknown
                    else f"no store answers there for {round(waited(), 1):g} s"
                )
            time.sleep(min(LOOK_S, left()))

    def _unknown(self, left: Callable[[], float]) -> list[str]:
        """Return the names of hosts, among the endpoints, that have no address within the time
        that is left."""
        found = []
        for host in dict.fromkeys(endpoint.host for endpoint in self._endpoints):
            try:
                call_with_timeout(left(), partial(socket.getaddrinfo, host, None))
            except OSError:
                found.append(host)
        return found

    def _joined(self, unknown: Container[str], left: Callable[[], float]) -> Store | None:
        """Connect to the store of a meeting at one of the endpoints that are known; each may take
        the time that is left. None if there is no store."""
        for endpoint in self._endpoints:
            if endpoint.host in unknown:
                continue
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                place = local_address(endpoint.host), endpoint.port
                socket.create_connection(place, timeout=min(REACH_S, left())).close()
                self._at = endpoint
                return open_tcp_store(*place, ANSWER_S, answer_s=min(ANSWER_S, left()))
        return None

    def _opened(self, unknown: Container[str], waited: float) -> Store | None:
        """Host a store if one of the endpoints is here and it is its turn; else None."""
        for turn, endpoint in enumerate(self._endpoints):
            if waited < turn * TURN_S or endpoint.host in unknown or not is_here(endpoint.host):
                continue
            place = local_address(endpoint.host), endpoint.port
            try:
                listening = listen(*endpoint, STORE, self._doubt)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise RendezvousConnectionError(f"{endpoint}: {error.strerror}") from None
                return None  # another has come first
            self._at = endpoint
            return open_tcp_store(*place, ANSWER_S, hosts=True, listening=listening)
        return None

    def _take_part(self) -> RendezvousInfo | None:
        """Wait for the next round to be closed; None if this node was late for it."""
        before = str(self._round) if self._round else ""
        here = self._round = int(
            self._ask(lambda store: store.compare_set("round", before, str(self._round + 1)))
        )
        ticket = self._ask(lambda store: store.add(f"{here}/arrived", 1))
        self._ask(lambda store: store.set(f"{here}/place/{ticket}", json.dumps(self.place)))
        end, own_store = self._await_end(here, ticket)
        self._tickets = end.members
        if ticket not in self._tickets:
            self._await_next(here, ticket)
            return None
        self.members, self.place = len(self._tickets), self._tickets.index(ticket)
        at = Endpoint(end.host, end.port)
        try:
            store = own_store or open_tcp_store(*at, self._reach_s)
        except (NoAnswer, RuntimeError, ValueError) as error:
            raise RendezvousConnectionError(f"the first node at {at}: {error}") from None
        return _info(store, at, self.place, self.members)

    def _await_end(self, here: int, ticket: int) -> tuple[_End, Store | None]:
        """Wait until a round is closed, by this node if it is the first of those alive.

        Returns what the one that closed it says, and the store of the start if that is hosted here.
        """
        began = changed = time.monotonic()
        alive: list[int] = []
        told = False
        while True:
            self._pulses.give(here, ticket)
            if self._ask(lambda store: store.check([f"{here}/closed"])):
                said = self._ask(lambda store: store.get(f"{here}/closed"))
                return _End(*json.loads(said)), None
            now, before = time.monotonic(), alive
            arrived = self._ask(lambda store: store.add(f"{here}/arrived", 0))
            first = next(t for t in range(1, arrived + 1) if self._is_alive(here, t, ticket))
            if first == ticket:
                alive = [t for t in range(1, arrived + 1) if self._is_alive(here, t, ticket)]
                if alive != before:
                    changed = now
                full = len(alive) >= self.nodes.most
                enough = len(alive) >= self.nodes.least and now - changed >= self._last_call_s
                sure = all(t == ticket or self._pulses.fresh(here, t) for t in alive)
                if (full or enough) and sure:
                    return self._close(here, ticket, alive)
            if now - began > TELL_S and not told:
                told = True
                self._tell(arrived if first != ticket else len(alive))
            if now - began > JOIN_S:
                raise RendezvousTimeoutError(
                    f"fewer than {count_noun(self.nodes.least, 'node')} came within {JOIN_S:g} s"
                    f"{loopback_hint(self._at.host)}"
                )
            time.sleep(LOOK_S)

    def _is_alive(self, here: int, ticket: int, own: int) -> bool:
        return ticket == own or self._pulses.alive(here, ticket)

    def _close(self, here: int, ticket: int, alive: list[int]) -> tuple[_End, Store | None]:
        """Close a round with those that are alive, unless another has just done it.

        Nodes that took part before come first, in the order that they had.
        """

        def place(other: int) -> tuple[float, int]:
            known = json.loads(self._ask(lambda store: store.get(f"{here}/place/{other}")))
            return (float("inf") if known is None else known, other)

        taken = [ticket, *sorted({*alive} - {ticket}, key=place)][: self.nodes.most]
        store, at = _host_store(self._at, self._reach_s, self._doubt)
        own = _End(sorted(taken, key=place), *at)
        said = self._ask(lambda s: s.compare_set(f"{here}/closed", "", json.dumps(own)))
        end = _End(*json.loads(said))
        return end, store if end == own else None

    def _await_next(self, here: int, ticket: int) -> None:
        """Wait, with signs of life, until a round is over that this node was late for."""
        heartbeat.print_notice(
            f"{count_noun(len(self._tickets), 'node')} of {self.nodes} train already: waiting at "
            f"{self._at} to be taken in"
        )
        while int(self._ask(lambda store: store.get("round"))) == here:
            self._pulses.give(here, ticket)
            time.sleep(LOOK_S)

    def _tell(self, there: int) -> None:
        heartbeat.print_notice(
            f"{there} of {self.nodes} nodes are at {self._at}; waiting for the others "
            "(megapipe.launch with the same --rdzv-id)"
        )

    def _ask(self, call: Callable[[Store], T]) -> T:
        """Return the store's answer; raises :class:`NoAnswer` where it gives none."""
        store = self._store
        assert store is not None
        return call_with_timeout(ANSWER_S, lambda: call(store))


class _End(NamedTuple):
    """The end of a round, as the node says that closes it."""

    members: list[int]
    """Tickets, in the order of the nodes."""
    host: str
    port: int


class _Pulses:
    """Signs of life of the nodes in a round: counts that rise."""

    def __init__(self, ask: Callable[[Callable[[Store], int]], int]) -> None:
        self._ask = ask
        self._seen: dict[tuple[int, int], tuple[int, float, bool]] = {}
        """Of a round and ticket: the count, when it was new, and whether it had risen then."""

    def give(self, here: int, ticket: int) -> None:
        self._ask(lambda store: store.add(f"{here}/pulse/{ticket}", 1))

    def alive(self, here: int, ticket: int) -> bool:
        """Whether a node has given a sign of life of late, or may yet do so."""
        return self._age(here, ticket)[0] < DEAD_S

    def fresh(self, here: int, ticket: int) -> bool:
        """Whether a node was seen to give a sign of life just now."""
        age, risen = self._age(here, ticket)
        return risen and age < FRESH_S

    def _age(self, here: int, ticket: int) -> tuple[float, bool]:
        count = self._ask(lambda store: store.add(f"{here}/pulse/{ticket}", 0))
        now, before = time.monotonic(), self._seen.get((here, ticket))
        if before is None or before[0] != count:
            self._seen[here, ticket] = (count, now, before is not None)
        _, since, risen = self._seen[here, ticket]
        return now - since, risen


def _host_store(near: Endpoint, timeout_s: float, tell: Tell) -> tuple[Store, Endpoint]:
    """A store at a free port of this host, and where those find it who know the endpoint `near`."""
    listening, host = listen_beside(*near, STORE, tell)
    port = listening.getsockname()[1]
    store = open_tcp_store(host, port, timeout_s, hosts=True, listening=listening)
    return store, Endpoint(host, port)


def _info(store: Store, at: Endpoint, place: int, members: int) -> RendezvousInfo:
    return RendezvousInfo(
        PrefixStore("launcher", store), place, members, RendezvousStoreInfo(at.host, at.port)
    )
