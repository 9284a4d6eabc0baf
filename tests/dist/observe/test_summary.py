"""The command that prints a run's summary."""

import json
import subprocess
import sys

import pytest

from megapipe.errors import ConfigError
from tests.parity.summary import SUMMARY


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


def test_the_command_prints_it(run_folder):
    result = subprocess.run(
        [sys.executable, "-m", "megapipe", "summary", str(run_folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "run folder  runs/quickstart-1"
    assert result.stderr == ""


@pytest.mark.full
def test_a_folder_without_a_summary_is_one_line(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "megapipe", "summary", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == ConfigError.exit_code
    assert result.stderr.startswith(f"megapipe: error: {tmp_path}/summary.json: No such file")
    assert len(result.stderr.splitlines()) == 1
