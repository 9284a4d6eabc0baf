"""A store listens where its peers look for it, and nowhere else."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from megapipe.launch.listening import listen
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
