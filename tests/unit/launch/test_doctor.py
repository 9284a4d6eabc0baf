"""The doctor says what there is, what is missing and what is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.errors import LaunchError
from megapipe.launch import doctor
from megapipe.launch.doctor import Finding, host, versions

ROOT = Path(__file__).parents[3]


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


def test_the_command_on_a_machine_without_a_gpu() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/doctor.py", *arguments]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDA_MODULE_LOADING": "LAZY"}
        return subprocess.run(
            command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120
        )

    plain = run()
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert "note   gpu          none: runs compute on the CPU" in plain.stdout
    spin = run("--spin")
    assert spin.returncode == LaunchError.exit_code
    assert spin.stderr.startswith("megapipe: error: --spin needs a CUDA device")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in plain.stdout
    heeded = "CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=LAZY, PYTORCH_ALLOC_CONF="
    assert f"ok     environment  {heeded}expandable_segments:True\n" in spin.stdout
