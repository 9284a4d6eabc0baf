"""The exit code that the first launcher of a job to end writes for a scheduler."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megapipe.launch import launcher
from megapipe.launch.launch_info import OPTIONS
from megapipe.launch.launcher import nodes_of, write_verdict


@pytest.mark.parametrize("there", [False, True])
def test_the_first_code_stays(there: bool, tmp_path: Path) -> None:
    """The file may be there before, and empty."""
    path = tmp_path / "verdict"
    if there:
        path.touch()
    for code in (2, 143):
        write_verdict(path, code)
    assert path.read_text() == "2\n"


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path / "no/verdict", 2)
    told = f"megapipe: error: --verdict {tmp_path}/no/verdict: No such file or directory; "
    assert capsys.readouterr().err == f"{told}the exit code is 2\n"


@pytest.mark.parametrize("verdict", [["--verdict", "a b"], ["--verdict=a b"], []])
def test_a_command_that_starts_the_job_again_has_a_verdict_of_its_own(
    verdict: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks print that command with the options that the launcher tells them."""
    monkeypatch.setenv(OPTIONS, "")
    monkeypatch.setattr(launcher, "launch", lambda *given, **more: 0)
    options = ["--nnodes", "1:2", "--rdzv-endpoint=a:1", "--rdzv-id", "a b"]
    launcher.main([*options[:2], *verdict, *options[2:], "train.py", "--verdict", "x"])
    assert shlex.split(os.environ[OPTIONS]) == options
    assert nodes_of(options) == (1, 2)
