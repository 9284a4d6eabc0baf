"""The objectives of megapipe plan, against the plans of all layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megapipe.plan.cache import Cache
from megapipe.plan.search.command import main
from megapipe.plan.search.objectives import numbers_of_devices
from tests.parity.searches import search_of

MODEL = (
    *("model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab_size=1000"),
    *("model.dtype=bf16", "model.tied_embeddings=false", "model.positions=rotary"),
    *("train.sequence_length=512", "train.global_batch=12", "train.steps=100", "plan.device=H100"),
    *("parallel.ranks_per_node=4", "parallel.device=cuda"),
)
FIXED = {
    "parallel.tp": "1",
    "parallel.cp": "1",
    "train.microbatch": "1",
    "pipeline.schedule": "1f1b",
    "activations.policy": "keep",
    "optimizer.zero": "1",
}
WORDS = (*MODEL, *(f"{key}={value}" for key, value in FIXED.items()))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> Any:
        assert main([*WORDS, *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def every(gpus: int, *words: str) -> Sequence[dict[str, Any]]:
    """Plan all layouts; return those that fit."""
    found = search_of([*MODEL, *words], FIXED, gpus, Cache([])).run(1000).best
    return [{"bytes": each.bytes, "seconds": each.seconds} for each in found]


def test_least_memory(planned: Any) -> None:
    found = planned("--gpus", "4", "--objective", "memory")
    sizes = [each["bytes"] for each in found]
    assert sizes == sorted(sizes)
    assert sizes[0] == min(each["bytes"] for each in every(4))
    assert found[0]["seconds"] > planned("--gpus", "4")[0]["seconds"], "the fastest needs more"


def test_cost_and_days(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The run has 100 steps of 12 x 512 tokens."""
    found = planned("--gpus", "1,2,4", "--objective", "cost", "--price", "2")
    for each in found:
        days = 100 * each["seconds"] / (24 * 3600)
        assert each["days"] == pytest.approx(days)
        assert each["cost"] == pytest.approx(days * 24 * each["gpus"] * 2)
    costs = [each["cost"] for each in found]
    assert costs == sorted(costs)
    assert len(found) == sum(len(every(gpus)) for gpus in (1, 2, 4))
    ten_times = planned(
        "--gpus", "1,2,4", "--objective", "cost", "--price", "2", "--tokens", "6.144M"
    )
    assert ten_times[0]["cost"] == pytest.approx(10 * costs[0])
    assert main([*WORDS, "--gpus", "1,2", "--price", "2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["rank", "GPUs"]
    assert [word for word in heading.split() if word in ("days", "cost")] == ["days", "cost"]
    assert {row.split()[1] for row in rows if row.split()[:1] and row[3:4].isdigit()} <= {"1", "2"}


def test_fewest_devices(planned: Any) -> None:
    large = ("model.hidden=768", "model.layers=8")
    sizes = {gpus: min(each["bytes"] for each in every(gpus, *large)) for gpus in (1, 2, 4)}
    assert sizes[1] > sizes[2] > sizes[4]
    room = (sizes[2] + sizes[4]) / 2 / 1e9
    limited = (*large, f"plan.device_gb={room}")
    found = planned("--gpus", "8", "--objective", "gpus", *limited)
    assert {each["gpus"] for each in found} == {4}
    assert every(4, *limited)
    assert not every(2, *limited)
    assert main([*WORDS, "--gpus", "2", "--objective", "gpus", *limited]) == 2


def test_numbers_of_devices() -> None:
    assert list(numbers_of_devices(30, 8)) == [1, 2, 4, 8, 16, 24]
    assert list(numbers_of_devices(6, 8)) == [1, 2, 4]
    assert list(numbers_of_devices(9, 6)) == [1, 2, 3, 6]


def test_longest_sequence(planned: Any, tmp_path: Path) -> None:
    room = "plan.device_gb=1.6"
    path = tmp_path / "longest.yaml"
    found = planned("--gpus", "2", "--objective", "sequence", room, "-o", str(path))
    length = found[0]["keys"]["train.sequence_length"]
    assert length > 512
    assert f"sequence_length: {length}\n" in path.read_text()
    power = 512
    while 2 * power <= length:
        power *= 2
    assert every(2, room, f"train.sequence_length={length}")
    assert not every(2, room, f"train.sequence_length={length + power // 8}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus", "0"], "--gpus: expected N or N,N, at least 1, not '0'"),
        (["--gpus", "2", "--tokens", "3Q"], "expected a number of tokens, as in 300B, not '3Q'"),
        (["--gpus", "2", "--price", "-1"], "--price -1.0: expected a number above 0"),
        (["--gpus", "2", "--objective", "cost"], "--objective cost: expected --price X"),
        (["--gpus", "2,4", "--objective", "gpus"], "--objective gpus takes one number of devices"),
        (["--gpus", "2,4", "--svg", "a.svg"], "--svg takes one number of devices"),
        (["--gpus", "2", "--objective", "sequence", "plan.device_gb=0.01"], "layouts fits"),
        (["--gpus", "2", "--objective", "gpus", "plan.device_gb=0.01"], "layouts fits"),
        (["--gpus", "2", "--objective", "gpus", "--device", "H1000"], "H1000 is not known"),
        (
            ["--gpus", "2", "--objective", "sequence", "--device", "cpu"],
            "--objective sequence: the memory of the device is not known",
        ),
        (["--gpus", "2", "--algorithm", "alpa", "--tokens", "1B"], "expected no --objective"),
    ],
)
def test_bad_input(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*WORDS, *argv])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
