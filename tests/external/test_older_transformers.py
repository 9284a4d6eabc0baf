"""The last transformers before version 5 reads exports as the installed version does.

Runs if ``scripts/test.sh --full`` has installed both versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megapipe.convert import export
from tests.external import read_by_older
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.running.other_systems import older_transformers
from tests.unit.model.transformers_models import CASES, FAMILIES, MIXTURES, model_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not older_transformers().is_dir(), reason="it is not installed"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export every case, with tokens and their logits from the installed transformers."""
    root = tmp_path_factory.mktemp("exports")
    rng = torch.Generator().manual_seed(0)
    for case in (*CASES, *FAMILIES, *MIXTURES):
        model = model_of(case).model_copy(update={"dtype": "fp32", "vocab_size": 259})
        params = init_random(model, seed=5, dtype=torch.float32)
        checkpoint = write_checkpoint(tmp_path_factory.mktemp("run"), model, params)
        export(checkpoint, root / case, tokenizer="byte")
        hf = AutoModelForCausalLM.from_pretrained(root / case, attn_implementation="eager")
        tokens = torch.randint(257, (2, 17), generator=rng)
        with torch.no_grad():
            torch.save((tokens, hf(tokens).logits), root / case / "expected.pt")
    return root


@pytest.fixture(scope="module")
def read(folders: Path) -> dict[str, Any]:
    """Read the exports in a process with the older version, and return what it prints."""
    done = subprocess.run(
        [sys.executable, read_by_older.__file__, str(folders)],
        env={**os.environ, "PYTHONPATH": str(older_transformers())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["version"].startswith("4.")
    return found["folders"]


@pytest.mark.parametrize("case", [*CASES, *FAMILIES, *MIXTURES])
def test_an_older_transformers_reads_an_export(case: str, read: dict[str, Any]) -> None:
    found = read[case]
    assert found["apart"] <= 1e-5
    assert found["loading"] == {}, "no weight that is initialised anew, none that is left"
    assert found["dtype"] == "torch.float32"
    assert found["ids"] == [found["end"], *read_by_older.TEXT.encode()]
    assert found["end"] == 256
