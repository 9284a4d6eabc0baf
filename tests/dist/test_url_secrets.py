"""A run whose data come by URLs with signatures: they stand nowhere in what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.jobs import ROOT, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.signed_urls import SECRET, SIGNED, WEB

ENTRY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from megapipe.train.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_no_output_of_a_run_has_it(tmp_path: Path) -> None:
    """One run ends well, one goes on with a new signature, and one has its URL refused."""
    script = tmp_path / "entry.py"
    script.write_text(f"{WEB}{ENTRY}")
    given = {
        **tiny(tmp_path),
        "data.mixture.a.source": SIGNED,
        "data.mixture.b.source": str(tmp_path / "corpus.txt"),
        "data.validation.held": SIGNED.replace("texts", "held"),
        "checkpoint.every": "2",
        "log.timeline": "[2]",
        "log.profile": "[2]",
        "log.sample_ids": "true",
        "log.tensorboard": "true",
        "log.wandb": "offline",
    }
    given.pop("data.source")

    def start(*more: str) -> str:
        outcome = run_forked(
            tmp_path, 2, *arguments(given), *more, "--traceback", script=str(script)
        )
        assert outcome.codes == ([3, 3] if "wrong0ne" in more[0] else [0, 0]), outcome.text
        return outcome.text

    said = start("train.steps=3")
    again = f"data.mixture.a.source={SIGNED}again"
    said += start(again, "train.steps=5")
    assert "changed since: data" not in said
    said += start("data.mixture.a.source=https://example.org/x?Signature=wrong0ne", "run.name=b")
    assert "403, url='https://example.org/x?***'" in said
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != script]
    names = {path.name for path in files}
    assert {"config.yaml", "provenance.json", "log.jsonl", "manifest.json"} <= names
    assert any(name.endswith(".wandb") for name in names)
    for secret in (SECRET, "wrong0ne"):
        assert secret not in said
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert any(b"texts.txt?***" in path.read_bytes() for path in files)
