"""A store listens where its peers look for it, and nowhere else."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from megapipe.launch.listening import listen, listen_beside
from megapipe.launch.rendezvous import LaunchInfo, RendezvousError, open_store


def addresses(port: int) -> set[str]:
    """The addresses, in hexadecimal, at which this host listens on a port."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and _port(row[1]) == port}


def _port(place: str) -> int:
    return int(place.split(":")[1], 16)


def test_a_store_is_not_seen_from_elsewhere() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    info = LaunchInfo(rank=0, world=2, local_world=2, address="127.0.0.1", port=port, launched=True)
    store = open_store(info, 5.0)
    assert addresses(port) == {"0100007F"}
    store.set("key", "value")
    with pytest.raises(RendezvousError, match="the port is in use; set MASTER_PORT to a free one"):
        open_store(info, 5.0)


def test_where_the_address_says_nothing_all_interfaces_are_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is another host's, or what a node calls itself by."""
    assert listen("192.0.2.1", 0) is None
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listen("node7", 0) is None


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) or socket.socket() as first:
        with pytest.raises(OSError, match="in use") as info:
            listen("127.0.0.1", first.getsockname()[1])
        assert info.value.errno == errno.EADDRINUSE


def test_a_socket_beside_the_store_is_where_the_store_is() -> None:
    made, host = listen_beside("127.0.0.1", 29500)
    with made:
        assert host == "127.0.0.1"
        assert addresses(made.getsockname()[1]) == {"0100007F"}


def test_beside_a_store_of_another_host_it_is_at_the_way_there() -> None:
    try:
        made, host = listen_beside("192.0.2.1", 29500)
    except OSError:
        pytest.skip("this host has no way to other networks")
    with made:
        assert made.getsockname()[0] == host
        assert addresses(made.getsockname()[1]) != {"00000000"}


def test_a_name_that_only_this_host_takes_for_itself_is_told_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian has it in /etc/hosts; the others have another address for the name."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    made, host = listen_beside("node7", 29500)
    with made:
        assert host == "node7"
        assert addresses(made.getsockname()[1]) == {"00000000"}
