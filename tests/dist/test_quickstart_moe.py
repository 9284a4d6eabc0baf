"""The preset with experts trains on eight processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megapipe.plan.moe.commands import main, rebalance, show
from tests.parity.jobs import ROOT, arguments, write_corpus
from tests.parity.launches import run_forked


@pytest.mark.full
def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps, on a text of few words; and what the page and the help of `megapipe experts` say
    of its log can be run as it stands there, on any machine."""
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    settings = {
        "run.folder": str(tmp_path / "runs"),
        "data.source": str(write_corpus(tmp_path / "corpus.txt", words=8000)),
        "data.cache": str(tmp_path / "cache"),
        "train.steps": "6",
        "train.sequence_length": "64",
        "train.validation_samples": "8",
        "optimizer.warmup_steps": "1",
        "log.expert_counts_every": "3",
    }
    preset = str(ROOT / "configs/quickstart_moe.yaml")
    outcome = run_forked(tmp_path, 8, preset, *arguments(settings))
    assert set(outcome.codes) == {0}, outcome.text
    assert "pp 2 x dp 2 x cp 1 x tp 2 (experts over ep 4 x etp 1), 8 processes" in outcome.text
    log = (tmp_path / "runs/quickstart_moe/log.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, log) if record["kind"] == "step"]
    losses = [record["loss"] for record in steps]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    (choices,) = {sum(counts) for counts in steps[-1]["routing"]["counts"].values()}
    assert choices == 2 * 8 * 64
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/moe.md").read_text(encoding="utf-8")
    texts = (page, show.__doc__ or "", rebalance.__doc__ or "")
    found = re.findall(
        r"experts(?:\.py)? (.* runs/quickstart_moe.*)$", "\n".join(texts), re.MULTILINE
    )
    assert len(found) == 4
    assert [main(example.split()) for example in found] == [0] * 4
