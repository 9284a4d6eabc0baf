"""A store listens where its peers look for it, and nowhere else."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from megapipe.launch import error_owner, listen_address
from megapipe.launch.elastic_rendezvous import ElasticRendezvous
from megapipe.launch.endpoints import Endpoint, NodeRange
from megapipe.launch.listen_address import INTERFACES
from megapipe.launch.rendezvous import LaunchInfo, RendezvousError, open_store
from tests.parity.jobs import free_port
from tests.parity.sockets import EVERYWHERE

WHAT = "the listener"
NODE = "127.257"
"""127.0.1.1 in other words, as good as the name of a host that Debian gives that address to, in the
eyes of that host alone."""


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)


def listen(address: str, port: int = 0) -> tuple[socket.socket | None, list[str]]:
    """Open a socket; return it and the lines of its maker."""
    lines: list[str] = []
    return listen_address.listen(address, port, WHAT, lines.append), lines


def listen_beside(address: str) -> tuple[socket.socket, str, list[str]]:
    lines: list[str] = []
    return *listen_address.listen_beside(address, 29500, WHAT, lines.append), lines


def addresses(port: int) -> set[str]:
    """Return the addresses, in hexadecimal, at which this host listens on a port."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and _port(row[1]) == port}


def _port(place: str) -> int:
    return int(place.split(":")[1], 16)


def test_a_store_is_not_seen_from_elsewhere() -> None:
    port = free_port()
    info = LaunchInfo(rank=0, world=2, local_world=2, address="127.0.0.1", port=port, launched=True)
    store = open_store(info, 5.0)
    assert addresses(port) == {"0100007F"}
    store.set("key", "value")
    with pytest.raises(RendezvousError, match="the port is in use; set MASTER_PORT to a free one"):
        open_store(info, 5.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_rank_0_that_nobody_knows_is_told_at_once(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of each node tells it. The name is looked for, as names may come late."""

    def ask(host: str, *given: object, **more: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    info = LaunchInfo(rank, 2, 0, 1, address="nowhere.invalid", launched=True)
    for local_rank, told in ((0, 1), (1, 0)):
        lines: list[str] = []
        with pytest.raises(RendezvousError, match=r"Name or service not known for 0 s .*MASTER_A"):
            open_store(replace(info, local_rank=local_rank), 0.3, lines.append)
        said = (
            "this host cannot resolve nowhere.invalid, the host of rank 0 (MASTER_ADDR); "
            "trying for 0.3 s (parallel.timeout_s), as a name may appear late"
        )
        assert lines == [said] * told


def test_a_list_of_hosts_that_does_not_begin_with_that_of_rank_0() -> None:
    """``mpirun --host`` and ``srun --distribution=arbitrary`` may make such a list."""
    info = LaunchInfo(0, 2, 0, 1, "192.0.2.1", free_port(), launched=True, is_listed=True)
    here = socket.gethostname()
    with pytest.raises(RendezvousError) as caught:
        open_store(info, 1.0)
    assert str(caught.value) == (
        f"rank 0 is on {here}, not on 192.0.2.1, the first host of SLURM's list: set "
        "MASTER_ADDR to the host of rank 0"
    )
    open_store(replace(info, address="127.0.0.1"), 1.0)


def test_the_store_of_a_pod_that_others_reach_through_a_service() -> None:
    """It knows itself as localhost alone."""
    info = LaunchInfo(0, 2, 0, 1, "localhost", free_port(), launched=True, kubernetes="10.0.0.1")
    lines: list[str] = []
    store = open_store(info, 5.0, lines.append)
    assert addresses(info.port) & EVERYWHERE
    store.set("key", "value")
    (line,) = lines
    assert line.startswith("MASTER_ADDR=localhost in a pod: the rendezvous store listens on all i")


def test_where_the_address_says_nothing_all_interfaces_are_listened_on() -> None:
    """It is another host's, or what a node calls itself by: a line says so, and what to name."""
    made, (line,) = listen("192.0.2.1")
    assert made is None
    assert line.startswith(
        f"192.0.2.1 is not an address of this host: {WHAT} listens on all interfa"
    )
    made, (line,) = listen(NODE)
    assert made is None
    assert line == (
        f"{NODE} is 127.0.1.1 on this host, which other hosts cannot reach: {WHAT} listens on "
        "all interfaces; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the nodes' network"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "=lo"),
        ("GLOO_SOCKET_IFNAME", "nowhere0,lo"),
    ],
)
def test_an_interface_that_is_named_is_listened_on_alone(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    made, (line,) = listen(NODE)
    assert made is not None
    with made:
        assert addresses(made.getsockname()[1]) == {"0100007F"}
    assert line.startswith(
        f"{NODE} is loopback on this host: {WHAT} listens at 127.0.0.1, by GLOO_"
    )
    made, host, lines = listen_beside(NODE)
    with made:
        assert addresses(made.getsockname()[1]) == {"0100007F"}
    assert (host, lines) == ("127.0.0.1", [])
    made, lines = listen("127.0.0.2")
    assert made is not None
    with made:
        assert made.getsockname()[0] == "127.0.0.2", "an address says more"
    assert lines == []


def test_processes_of_its_host_reach_a_store_on_such_an_interface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They too take the name for loopback, where nobody listens."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    info = LaunchInfo(world=2, local_world=2, address=NODE, port=port, launched=True)
    store = open_store(info, 5.0)
    assert addresses(port) == {"0100007F"}
    store.set("key", "value")
    assert open_store(replace(info, rank=1, local_rank=1), 5.0).get("key") == b"value"
    assert error_owner._is_taken(info)
    assert capsys.readouterr().err.count("the rendezvous store listens at 127.0.0.1, by ") == 1


@pytest.mark.parametrize(("interface", "host"), [("lo", "127.0.0.1"), ("", NODE)])
def test_a_launcher_tells_of_its_stores_once(
    interface: str,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is one in which they meet, which another on this host finds, and one for each start."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    endpoint = Endpoint(NODE, free_port())
    meeting, other = (
        ElasticRendezvous([endpoint], "job", NodeRange(1, 2), reach_s=10, last_call_s=0)
        for _ in range(2)
    )
    meeting._joined = lambda unknown, left: None  # type: ignore[method-assign]
    starts = [meeting.next_rendezvous() for _ in range(2)]
    places = [start.bootstrap_store_info for start in starts]
    ports = {endpoint.port, *(place.master_port for place in places if place is not None)}
    assert len(ports) == 3
    assert {place.master_addr for place in places if place is not None} == {host}
    for port in ports:
        open_at = addresses(port)
        assert (open_at == {"0100007F"}) if interface else (open_at & EVERYWHERE)
    other._opened = lambda unknown, waited: None  # type: ignore[method-assign]
    assert other._enter() is not None
    assert capsys.readouterr().err.count(f"megapipe: {NODE} is ") == 1


def test_a_port_that_is_taken() -> None:
    first, _ = listen("127.0.0.1")
    assert first is not None
    with first:
        with pytest.raises(OSError, match="in use") as info:
            listen("127.0.0.1", first.getsockname()[1])
        assert info.value.errno == errno.EADDRINUSE


def test_a_socket_beside_the_store_is_where_the_store_is() -> None:
    made, host, lines = listen_beside("127.0.0.1")
    with made:
        assert (host, lines) == ("127.0.0.1", [])
        assert addresses(made.getsockname()[1]) == {"0100007F"}


def test_beside_a_store_of_another_host_it_is_at_the_way_there() -> None:
    try:
        made, host, lines = listen_beside("192.0.2.1")
    except OSError:
        pytest.skip("this host has no way to other networks")
    with made:
        assert made.getsockname()[0] == host
        assert addresses(made.getsockname()[1]) != {"00000000"}
    assert lines == []


def test_a_name_that_only_this_host_takes_for_itself_is_told_to_others() -> None:
    made, host, (line,) = listen_beside(NODE)
    with made:
        assert host == NODE
        assert addresses(made.getsockname()[1]) == {"00000000"}
    assert f"{WHAT} listens on all interfaces; set GLOO_SOCKET_IFNAME" in line
