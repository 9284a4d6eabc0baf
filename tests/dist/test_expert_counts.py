"""The choices of each expert in the log of a run, and what is drawn of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.plan.moe.commands import main
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

TOKENS = 4 * 16
SETTINGS = {
    "model.moe.num_experts": "4",
    "model.moe.expert_ffn_hidden": "8",
    "model.moe.first_dense_layers": "1",
    "parallel.dp": "2",
    "parallel.ep": "2",
    "log.expert_counts_every": "2",
}


@pytest.mark.full
def test_a_run_logs_them_and_they_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second step and the last; each token has made two choices in the layer that has
    experts."""
    outcome = run_forked(tmp_path, 2, *arguments({**tiny(tmp_path), **SETTINGS}))
    assert set(outcome.codes) == {0}, outcome.text
    folder = tmp_path / "runs/run"
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    routing = {each["step"]: each["routing"] for each in records if each["kind"] == "step"}
    assert routing.keys() == {1, 2, 3}
    assert routing[1]["counts"] is None
    assert all(each["max_load_by_layer"] == {"1": each["max_load"]} for each in routing.values())
    for step in (2, 3):
        ((layer, choices),) = routing[step]["counts"].items()
        assert layer == "1"
        assert sum(choices) == 2 * TOKENS
        assert max(choices) * 4 / sum(choices) == pytest.approx(routing[step]["max_load"])
    assert main(["show", str(folder)]) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title == "step 3: choices of each expert, relative to the mean of its layer"
    assert row.startswith("layer 1 |")
    assert f"largest {routing[3]['max_load']:.2f}, " in row
    assert main(["show", str(folder), "--layer", "1"]) == 0
    assert [line[:7] for line in capsys.readouterr().out.splitlines()[1:]] == ["step 2 ", "step 3 "]
