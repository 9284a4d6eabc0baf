"""scripts/schedule.py as a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config.model import ModelConfig
from megapipe.model.gpt.flops import head_flops, layer_flops
from tests.parity.launches import Ended, fork_script

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--ranks", "4", "--microbatches", "8")


def test_the_script_runs_and_loads_nothing_heavy():
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            ROOT / "scripts/schedule.py",
            "simulate",
            "zb_h1",
            *SMALL,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("zb_h1\n")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "megapipe.schedule.timing.simulate" in loaded
    assert not loaded & {"torch", "matplotlib", "rich", "pydantic", "ortools"}


def test_a_reader_that_leaves_early_is_no_error():
    code = f"{sys.executable} {ROOT}/scripts/schedule.py list --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[", b"")


def test_costs_of_a_configuration(tmp_path):
    """The stages of its model, shared out for each schedule: 6 layers and a head of three."""
    path = tmp_path / "model.yaml"
    path.write_text("model: {layers: 6, vocab_size: 6144}\nparallel: {pp: 2}\n")
    comparison = ["compare", "gpipe", "hanayo", "--ranks", "3", "--microbatches", "1"]

    def run(*command: str) -> Ended:
        return fork_script(tmp_path, "scripts/schedule.py", *command, "--config", str(path))

    done = run(*comparison, "--json")
    assert done.err == ""
    told = {row["schedule"]: row["makespan"] for row in json.loads(done.out)}
    model = ModelConfig(layers=6).resolved(vocab_size=6144, sequence_length=256)
    layer = layer_flops(model, 256)
    assert told["gpipe"] == pytest.approx((18 * layer + 3 * head_flops(model)) / layer)
    assert told["hanayo"] == pytest.approx(told["gpipe"])
    taken = run(*comparison, "--cost", "F=2")
    assert (taken.code, taken.out) == (2, "")
    assert f"argument --cost: F is in {path} already" in taken.err
    assert len(taken.err.splitlines()) == 1
