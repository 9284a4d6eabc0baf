"""A host whose loopback interface is down: each command says so in a line."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from megapipe.errors import LaunchError
from megapipe.launch import doctor, error_owner, local
from megapipe.launch.elastic_rendezvous import ElasticRendezvous
from megapipe.launch.endpoints import NodeRange
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.rendezvous import RendezvousError, open_store, start_process_group

LINE = (
    r"^the loopback interface does not work \(connecting to 127.0.0.1: Network is "
    r"unreachable\): enable it with 'ip link set lo up'$"
)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*given: Any, **more: Any) -> NoReturn:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", connect)


def test_one_that_works() -> None:
    assert loopback_problem() is None
    assert "loopback" not in [finding.what for finding in doctor.host({})]


def test_what_is_no_matter_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def server(*given: Any, **more: Any) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_server", server)
    assert loopback_problem() is None


@pytest.mark.usefixtures("broken")
def test_the_doctor_finds_it_wrong() -> None:
    (found,) = (finding for finding in doctor.host({}) if finding.what == "loopback")
    assert found.state == "wrong"
    assert "the loopback interface does not work" in found.text


@pytest.mark.usefixtures("broken")
def test_a_launcher_and_processes_of_a_notebook_say_it() -> None:
    with pytest.raises(LaunchError, match=LINE):
        ElasticRendezvous([], "", NodeRange(), reach_s=1, last_call_s=1).next_rendezvous()
    context: Any = None
    with pytest.raises(LaunchError, match=LINE):
        local.run_ranks(context, 2, print, (), group_timeout_s=1)


@pytest.mark.usefixtures("broken")
def test_ranks_that_were_to_meet_there_say_it_once() -> None:
    first = LaunchInfo(0, 2, 0, 2, address="localhost", launched=True)
    second = LaunchInfo(1, 2, 1, 2, address="localhost", launched=True)
    for info in (first, second):
        with pytest.raises(RendezvousError, match=LINE):
            open_store(info, 5)
    assert not error_owner.may_print_alone(second)


@pytest.mark.usefixtures("broken")
def test_a_single_process_says_it_where_gloo_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> NoReturn:
        raise RuntimeError("Unable to find interface for: [127.0.0.1]")

    monkeypatch.setattr(dist, "init_process_group", fails)
    info = LaunchInfo()
    store = open_store(info, 5)
    with pytest.raises(LaunchError, match=LINE):
        start_process_group(store, info, "gloo", 5)
    monkeypatch.undo()
    monkeypatch.setattr(dist, "init_process_group", fails)
    with pytest.raises(RuntimeError, match="Unable to find interface"):
        start_process_group(store, info, "gloo", 5)
