"""scripts/convert.py as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.both_ways import change_json, write_both_ways
from tests.parity.converted import state_of
from tests.parity.launches import fork_script


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_both_ways(tmp_path)


@pytest.mark.full
def test_the_script_itself(given: Path) -> None:
    argv = ["megapipe-to-hf", "run", "new", "--dtype", "bf16"]
    done = fork_script(given, "scripts/convert.py", *argv)
    assert (done.code, done.out) == (0, "new: step 3 of run/checkpoints/step-00000003\n")
    assert done.err.startswith("megapipe: model.safetensors: 21 tensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in state_of(given / "new").values())
    change_json(given / "hf/config.json", model_type="opt")
    for argv, code in (
        (["hf-to-megapipe", "hf", "other"], 2),
        (["megapipe-to-hf", "run", "new"], 5),
        (["megapipe-to-hf", "run", "other", "--tokenizer", "./gone"], 3),
    ):
        fork_script(given, "scripts/convert.py", *argv).assert_one_line(code)
