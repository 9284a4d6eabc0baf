"""The doctor says what a machine has, what is missing and what is wrong."""

from __future__ import annotations

import socket

import pytest

from megapipe.errors import LaunchError
from megapipe.launch import doctor
from megapipe.launch.doctor import Finding, host, versions


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "ok"), ("2.10.0", "ok"), ("2.9.1+cu126", "wrong"), (None, "wrong")],
)
def test_an_old_torch_is_wrong(
    version: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "torch" else "1")
    (found,) = (finding for finding in versions() if finding.what == "torch")
    assert found.state == state
    assert state == "ok" or "expected" in found.text


@pytest.mark.parametrize(
    ("address", "environ", "state"),
    [
        ("10.0.0.7", {}, "ok"),
        ("127.0.1.1", {}, "note"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "ib0"}, "ok"),
        (None, {}, "note"),
    ],
)
def test_a_host_that_others_cannot_reach_is_noted(
    address: str | None,
    environ: dict[str, str],
    state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(name: str) -> str:
        if address is None:
            raise socket.gaierror("no address")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolved)
    (found,) = (finding for finding in host(environ) if finding.what == "network")
    assert found.state == state
    assert ("GLOO_SOCKET_IFNAME=" in found.text) == (state == "note")


def test_one_queue_is_noted() -> None:
    notes = [finding.what for finding in host({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})]
    assert "environment" in notes
    assert "environment" not in [finding.what for finding in host({})]


def test_what_is_wrong_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: iter([Finding("wrong", "nccl", "none")]))
    assert doctor.main([]) == LaunchError.exit_code
    assert "wrong  nccl         none\n" in capsys.readouterr().out
