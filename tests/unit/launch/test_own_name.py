"""Hosts that know a name, as Debian's know their own, by an address that leads to themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from megapipe.errors import LaunchError
from megapipe.launch import elastic_rendezvous
from megapipe.launch.elastic_rendezvous import ElasticRendezvous
from megapipe.launch.endpoints import Endpoint, NodeRange
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.listen_address import INTERFACES
from megapipe.launch.rendezvous import RendezvousError, compare_ranks, connecting, open_store
from megapipe.launch.shutdown import Shutdown
from tests.parity.jobs import free_port

NODE = "127.257"
"""127.0.1.1 in other words, as good as a name that has that address."""


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)


GLOO = "[/x/gloo/pair.cc:1] timed out connecting: SO_ERROR: Connection refused, remote=[{}]:9632$0"
SET = (
    "a host resolves its own name to {}, which other hosts cannot reach: set "
    "GLOO_SOCKET_IFNAME on all hosts"
)


@pytest.mark.parametrize(
    ("address", "local_world", "told"),
    [("127.0.1.1", 1, True), ("::1", 1, True), ("10.9.0.1", 1, False), ("127.0.1.1", 2, False)],
)
def test_hosts_that_look_for_each_other_at_loopback_end_with_what_is_to_be_set(
    address: str, local_world: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is what the user sees last, behind minutes of others."""
    port = free_port()
    info = LaunchInfo(0, 2, 0, local_world, port=port, launched=True)
    ending = Shutdown(info, open_store(info, 5.0), linger_s=0.1)
    with pytest.raises(RuntimeError) as caught, connecting(info):
        raise RuntimeError(GLOO.format(address))
    assert ending.report_unexpected(caught.value) == 4
    said = capsys.readouterr().err
    assert (SET.format(address) in said) == told


def test_hosts_that_do_not_come_to_an_address_of_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has taken its own name for the address of rank 0, or another's name for its own."""
    hint = "is 127.0.1.1 on this host, which other hosts cannot reach: pass this host's address"
    port = free_port()
    info = LaunchInfo(1, 2, 0, 1, NODE, port, launched=True)
    with pytest.raises(RendezvousError, match=f"refused for 0 s .*; look at .*; {NODE} {hint}"):
        open_store(info, 0.3)
    alone = replace(info, local_rank=1, local_world=2)
    with pytest.raises(RendezvousError, match=r"refused for 0 s .* look at the output of rank 0$"):
        open_store(alone, 0.3)
    for each, told in ((info, True), (alone, False)):
        with pytest.raises(LaunchError, match="1 of 2 ranks arrived") as late:
            compare_ranks(HashStore(), replace(each, rank=0), {}, 0.3)
        assert (f"; {NODE} {hint}" in str(late.value)) == told
    monkeypatch.setattr(elastic_rendezvous, "JOIN_S", 0.5)
    nodes = ElasticRendezvous(
        [Endpoint(NODE, port)], "job", NodeRange(2, 2), reach_s=5, last_call_s=0
    )
    with pytest.raises(RendezvousTimeoutError, match=f"fewer than 2 nodes .*; {NODE} {hint}"):
        nodes.next_rendezvous()
