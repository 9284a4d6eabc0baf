"""Lets the launchers of several nodes agree on which nodes take part in a start of the job.

One launcher hosts a store at an endpoint that is known to all launchers. Each start of the job is a
round in this rendezvous store: every launcher takes a ticket and sends heartbeats. The launcher
with the lowest ticket that is alive closes the round. It does so when all nodes have come, or when
the minimum number has come and no further node comes for a while. It then hosts a second store, for
this start alone, so the ranks find no keys of earlier starts. A launcher that comes late waits for
the next round. Clocks of nodes are not compared. The ranks never use the rendezvous store, so a
running job does not depend on it.

With several endpoints, any of their nodes may be lost. The other launchers look for a store at each
endpoint, and a launcher hosts one at the first endpoint that is on its own host.
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
from megapipe.launch.listen_address import (
    STORE,
    Report,
    is_here,
    listen,
    listen_beside,
    local_address,
    loopback_hint,
)
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.stores import ANSWER_S, open_tcp_store
from megapipe.text import count_noun
from megapipe.util import heartbeat
from megapipe.util.timeouts import NoAnswer, call_with_timeout

LOOK_S = 0.25
"""Seconds between two heartbeats of a node, and between two looks at the heartbeats of others."""
FRESH_S = 1.5
"""Maximum age of a node's newest heartbeat, in seconds, for the node to be in a start."""
DEAD_S = 5.0
"""Seconds without a heartbeat after which a node counts as lost."""
TURN_S = 5.0
"""Seconds that a node gives each endpoint listed before its own to host the store; then the node
hosts the store itself."""
LEAST_S = 0.05
"""Lower bound of the time limit of an attempt to connect, in seconds."""
REACH_S = 2.0
"""Upper bound of the time limit of an attempt to connect, in seconds."""
JOIN_S = 600.0
"""Seconds within which the minimum number of nodes must come; otherwise the rendezvous fails."""
REPORT_AFTER_S = 10.0
"""Seconds of waiting after which a launcher prints that it waits."""
T = TypeVar("T")


class ElasticRendezvous(RendezvousHandler):
    """A launcher's side of the rendezvous of the job named `job`.

    A launcher looks for the store for `reach_s` seconds. Once the minimum number of nodes has come,
    a round waits `last_call_s` seconds for further nodes. Errors are torch's RendezvousError.
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
        """Number of nodes that take part in the newest round."""
        self._endpoints = endpoints
        self._job = job
        self._reach_s = reach_s
        self._last_call_s = last_call_s
        self._store: Store | None = None
        self._at = endpoints[0] if endpoints else Endpoint("localhost", 0)
        self._round = 0
        self._tickets: list[int] = []
        """Tickets of the nodes of the newest round, by node index."""
        self.node_index: int | None = None
        """Index of this node among the nodes of the newest round; None before the first round."""
        self._pulses = _Pulses(self._ask)
        self._news = ""
        self._doubts: set[str] = set()
        """Messages about listening addresses that were printed already."""

    @property
    def endpoints_text(self) -> str:
        """Endpoints of the job; for a job of one node a description of its loopback address."""
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
        """Return 0, so that torchrun's agent does not end the ranks when a node comes.
        :meth:`nodes_waiting` has the real number."""
        return 0

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round. Return the store of the start, and this node's index."""
        if self.nodes.most == 1:
            self.members, self.node_index = 1, 0
            if (problem := loopback_problem()) is not None:
                raise LaunchError(problem)
            here = Endpoint("localhost", 0)
            return _info(*_host_store(here, self._reach_s, self._doubt), 0, 1)
        while True:
            try:
                self._store = self._store or self._enter()
                info = self._take_part()
            except (DistError, NoAnswer):  # the store's host has ended or cannot be reached
                self._store, self._round = None, 0
                self._pulses = _Pulses(self._ask)  # rounds of another store have the same numbers
            else:
                if info is not None:
                    self._print_on_first_node(self._news)
                    self._news = ""
                    return info

    def report_restart(self, news: str) -> None:
        """Print `news`, a line about a restart, if this node has index 0. Another node keeps the
        line, and prints it if it gets index 0 in the next round."""
        self._news = "" if self.node_index == 0 else news
        self._print_on_first_node(news)

    def _print_on_first_node(self, news: str) -> None:
        if news and self.node_index == 0:
            heartbeat.print_notice(news)

    def _doubt(self, line: str) -> None:
        """Print a line about where a store listens, unless the same line was printed before."""
        if line not in self._doubts:
            self._doubts.add(line)
            heartbeat.print_notice(line)

    def nodes_waiting(self) -> int:
        """Return the number of nodes that wait for the next round and could join the job now.

        Launchers of the newest round call this while their ranks run.
        """
        if self.members == self.nodes.most or self._store is None:
            return 0
        with contextlib.suppress(DistError, NoAnswer):
            arrived = self._ask(lambda store: store.add(f"{self._round}/arrived", 0))
            late = {*range(1, arrived + 1)} - {*self._tickets}
            return sum(self._pulses.fresh(self._round, ticket) for ticket in late)
        return 0

    def _enter(self) -> Store:
        """Connect to the rendezvous store, or host it if no store answers and it is this node's
        turn (:data:`TURN_S`)."""
        began, reported = time.monotonic(), False

        def waited() -> float:
            return time.monotonic() - began

        def left() -> float:
            return max(self._reach_s - waited(), LEAST_S)

        while True:
            unknown = self._unknown(left)
            store = self._joined(unknown, left) or self._opened(unknown, waited())
            if store is not None:
                return PrefixStore(f"megapipe/{self._job}", store)
            if unknown and not reported:
                reported = True
                heartbeat.print_notice(
                    f"this host cannot resolve {' and '.join(unknown)} (--rdzv-endpoint); "
                    f"trying for {self._reach_s:g} s, as a name may appear late"
                )
            if waited() >= self._reach_s:
                raise RendezvousConnectionError(
                    f"this host cannot resolve {' and '.join(unknown)}"
                    if unknown
                    else f"no store answers there for {round(waited(), 1):g} s"
                )
            time.sleep(min(LOOK_S, left()))

    def _unknown(self, left: Callable[[], float]) -> list[str]:
        """Return the hosts of endpoints whose names cannot be resolved in the remaining time."""
        found = []
        for host in dict.fromkeys(endpoint.host for endpoint in self._endpoints):
            try:
                call_with_timeout(left(), partial(socket.getaddrinfo, host, None))
            except OSError:
                found.append(host)
        return found

    def _joined(self, unknown: Container[str], left: Callable[[], float]) -> Store | None:
        """Connect to the store at one of the endpoints with known names. Each attempt may take the
        remaining time. Return None if no store answers."""
        for endpoint in self._endpoints:
            if endpoint.host in unknown:
                continue
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                address = local_address(endpoint.host), endpoint.port
                socket.create_connection(address, timeout=min(REACH_S, left())).close()
                self._at = endpoint
                return open_tcp_store(*address, ANSWER_S, answer_s=min(ANSWER_S, left()))
        return None

    def _opened(self, unknown: Container[str], waited: float) -> Store | None:
        """Host the store if an endpoint is on this host, and the nodes of the endpoints before it
        have had `waited` seconds to host it; else return None."""
        for turn, endpoint in enumerate(self._endpoints):
            if waited < turn * TURN_S or endpoint.host in unknown or not is_here(endpoint.host):
                continue
            address = local_address(endpoint.host), endpoint.port
            try:
                listening = listen(*endpoint, STORE, self._doubt)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise RendezvousConnectionError(f"{endpoint}: {error.strerror}") from None
                return None  # another process was faster
            self._at = endpoint
            return open_tcp_store(*address, ANSWER_S, hosts=True, listening=listening)
        return None

    def _take_part(self) -> RendezvousInfo | None:
        """Wait until the next round is closed. Return None if this node came too late for it."""
        before = str(self._round) if self._round else ""
        here = self._round = int(
            self._ask(lambda store: store.compare_set("round", before, str(self._round + 1)))
        )
        ticket = self._ask(lambda store: store.add(f"{here}/arrived", 1))
        self._ask(lambda store: store.set(f"{here}/place/{ticket}", json.dumps(self.node_index)))
        end, own_store = self._await_end(here, ticket)
        self._tickets = end.members
        if ticket not in self._tickets:
            self._await_next(here, ticket)
            return None
        self.members, self.node_index = len(self._tickets), self._tickets.index(ticket)
        at = Endpoint(end.host, end.port)
        try:
            store = own_store or open_tcp_store(*at, self._reach_s)
        except (NoAnswer, RuntimeError, ValueError) as error:
            raise RendezvousConnectionError(f"the first node at {at}: {error}") from None
        return _info(store, at, self.node_index, self.members)

    def _await_end(self, here: int, ticket: int) -> tuple[_End, Store | None]:
        """Wait until round number `here` is closed. The node with the lowest ticket alive closes
        it.

        Return the result of the round, and the store of the start if this node hosts that store.
        """
        began = changed = time.monotonic()
        alive: list[int] = []
        reported = False
        while True:
            self._pulses.send(here, ticket)
            if self._ask(lambda store: store.check([f"{here}/closed"])):
                result = self._ask(lambda store: store.get(f"{here}/closed"))
                return _End(*json.loads(result)), None
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
            if now - began > REPORT_AFTER_S and not reported:
                reported = True
                self._report_waiting(arrived if first != ticket else len(alive))
            if now - began > JOIN_S:
                raise RendezvousTimeoutError(
                    f"fewer than {count_noun(self.nodes.least, 'node')} came within {JOIN_S:g} s"
                    f"{loopback_hint(self._at.host)}"
                )
            time.sleep(LOOK_S)

    def _is_alive(self, here: int, ticket: int, own: int) -> bool:
        return ticket == own or self._pulses.alive(here, ticket)

    def _close(self, here: int, ticket: int, alive: list[int]) -> tuple[_End, Store | None]:
        """Close round number `here` with the nodes that are alive, if no other node is faster.

        Nodes of the previous round come first, in their previous order.
        """

        def sort_key(other: int) -> tuple[float, int]:
            known = json.loads(self._ask(lambda store: store.get(f"{here}/place/{other}")))
            return (float("inf") if known is None else known, other)

        taken = [ticket, *sorted({*alive} - {ticket}, key=sort_key)][: self.nodes.most]
        store, at = _host_store(self._at, self._reach_s, self._doubt)
        own = _End(sorted(taken, key=sort_key), *at)
        result = self._ask(lambda s: s.compare_set(f"{here}/closed", "", json.dumps(own)))
        end = _End(*json.loads(result))
        return end, store if end == own else None

    def _await_next(self, here: int, ticket: int) -> None:
        """Send heartbeats until round number `here`, for which this node came too late, is over."""
        heartbeat.print_notice(
            f"{count_noun(len(self._tickets), 'node')} of {self.nodes} run the job already: "
            f"waiting at {self._at} to join"
        )
        while int(self._ask(lambda store: store.get("round"))) == here:
            self._pulses.send(here, ticket)
            time.sleep(LOOK_S)

    def _report_waiting(self, arrived: int) -> None:
        heartbeat.print_notice(
            f"{arrived} of {self.nodes} nodes are at {self._at}; waiting for the others "
            "(megapipe.launch with the same --rdzv-id)"
        )

    def _ask(self, call: Callable[[Store], T]) -> T:
        """Return the store's answer. Raises :class:`NoAnswer` if none comes in time."""
        store = self._store
        assert store is not None
        return call_with_timeout(ANSWER_S, lambda: call(store))


class _End(NamedTuple):
    """Result of a round, as written by the node that closed it."""

    members: list[int]
    """Tickets of the nodes, in node order."""
    host: str
    port: int


class _Pulses:
    """Heartbeats of the nodes in a round. Each node increases a separate count in the store."""

    def __init__(self, ask: Callable[[Callable[[Store], int]], int]) -> None:
        self._ask = ask
        self._seen: dict[tuple[int, int], tuple[int, float, bool]] = {}
        """Newest heartbeat of each (round, ticket): the count, the time when it was first seen, and
        whether the count was seen to rise."""

    def send(self, here: int, ticket: int) -> None:
        self._ask(lambda store: store.add(f"{here}/pulse/{ticket}", 1))

    def alive(self, here: int, ticket: int) -> bool:
        """Whether a node's newest heartbeat is recent. A node also counts as alive while it has
        been watched for less than DEAD_S seconds."""
        return self._age(here, ticket)[0] < DEAD_S

    def fresh(self, here: int, ticket: int) -> bool:
        """Whether a node's heartbeat was seen to rise within the last FRESH_S seconds."""
        age, risen = self._age(here, ticket)
        return risen and age < FRESH_S

    def _age(self, here: int, ticket: int) -> tuple[float, bool]:
        count = self._ask(lambda store: store.add(f"{here}/pulse/{ticket}", 0))
        now, before = time.monotonic(), self._seen.get((here, ticket))
        if before is None or before[0] != count:
            self._seen[here, ticket] = (count, now, before is not None)
        _, since, risen = self._seen[here, ticket]
        return now - since, risen


def _host_store(near: Endpoint, timeout_s: float, report: Report) -> tuple[Store, Endpoint]:
    """Host a store at a free port. Return the store and its endpoint, which has an address for all
    nodes that can reach `near`."""
    listening, host = listen_beside(*near, STORE, report)
    port = listening.getsockname()[1]
    store = open_tcp_store(host, port, timeout_s, hosts=True, listening=listening)
    return store, Endpoint(host, port)


def _info(store: Store, at: Endpoint, node_index: int, members: int) -> RendezvousInfo:
    return RendezvousInfo(
        PrefixStore("launcher", store), node_index, members, RendezvousStoreInfo(at.host, at.port)
    )
