"""Runs on a mixture: the same in every layout, and each sample once whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.observe.sample_log import check, read_samples
from tests.parity.jobs import Job, arguments, tiny, write_corpus
from tests.parity.launches import run_forked

SOURCES = {"long": 900, "short": 300, "rare": 200}


def settings(folder: Path, **given: str) -> dict[str, str]:
    """Return the settings of a mixture in which `rare` is used up early, and `long` fades."""
    texts = {name: write_corpus(folder.parent / f"{name}.txt", n) for name, n in SOURCES.items()}
    folder.mkdir(exist_ok=True)
    usual = {**tiny(folder), "data.cache": str(folder.parent / "cache"), "log.sample_ids": "true"}
    del usual["data.source"]
    usual |= {f"data.mixture.{name}.source": str(path) for name, path in texts.items()}
    usual |= {
        "data.mixture.long.weight": "[[0, 4], [3, 1]]",
        "data.mixture.short.weight": "1",
        "data.mixture.rare.weight": "2",
        "data.mixture.rare.tokens": str(16 * 9),
        "data.test.rare": str(texts["rare"]),
        "train.steps": "6",
        "train.global_batch": "8",
        "model.dtype": "fp64",
    }
    return usual | given


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def by_source(folder: Path) -> list[dict[str, tuple[float | None, int, int]]]:
    return [
        {name: tuple(source.values()) for name, source in record["sources"].items()}
        for record in records(folder, "step")
    ]


@pytest.mark.slow
def test_losses_of_sources_are_the_same_in_every_layout(tmp_path: Path) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    outcome = run_forked(alone, 1, *arguments(settings(alone)))
    assert set(outcome.codes) == {0}, outcome.text
    layout = {"parallel.pp": "2", "parallel.dp": "2", "parallel.tp": "2"}
    given = settings(several, **layout, **{"optimizer.post_validation": "true"})
    outcome = run_forked(several, 8, *arguments(given))
    assert set(outcome.codes) == {0}, outcome.text
    found, expected = by_source(several), by_source(alone)
    assert len(found) == 6
    for some, right, record in zip(found, expected, records(alone, "step"), strict=True):
        assert list(some) == list(SOURCES)
        for name in SOURCES:
            assert some[name][1:] == right[name][1:]
            assert (some[name][0] or 0) == pytest.approx(right[name][0] or 0, rel=1e-9)
        total = sum((loss or 0) * tokens for loss, tokens, _ in right.values())
        assert total / record["tokens"] == pytest.approx(record["loss"], rel=1e-12)
    assert [source["rare"][2] for source in expected][-1] == 9
    assert expected[-1]["rare"][:2] == (None, 0), "used up"
    for kind in ("name", "split", "loss"):
        some, right = ([r[kind] for r in records(f, "validation")] for f in (several, alone))
        assert some == (pytest.approx(right, rel=1e-9) if kind == "loss" else right)
    last = [(record["split"], record["name"]) for record in records(alone, "validation")][-4:]
    assert last == [*(("validation", name) for name in SOURCES), ("test", "rare")]


@pytest.mark.full
def test_each_sample_is_taken_once_over_a_kill_and_other_layouts_and_batches(
    tmp_path: Path,
) -> None:
    """The run is killed by -9 after a checkpoint, and goes on twice, each time in another
    layout."""
    folder = tmp_path / "run"
    first = settings(folder, **{"parallel.dp": "2", "checkpoint.every": "2", "train.steps": "400"})
    with Job(folder) as job:
        job.launch(2, *arguments(first))
        job.kill_ranks("step-00000004")
        job.end()
    more = {"train.steps": "400", "parallel.pp": "2", "train.global_batch": "6"}
    outcome = run_forked(folder, 2, *arguments(settings(folder, **more)), "train.stop_after=30")
    assert set(outcome.codes) == {0}, outcome.text
    more = {"train.steps": "400", "parallel.dp": "3", "train.global_batch": "12"}
    outcome = run_forked(folder, 3, *arguments(settings(folder, **more)), "train.stop_after=40")
    assert set(outcome.codes) == {0}, outcome.text
    logged = read_samples(folder / "runs/run")
    assert list(logged.steps) == list(range(1, 41))
    assert [len(logged.steps[step]) for step in (1, 30, 40)] == [8, 6, 12]
    lines = check(logged)
    assert "rare: 9 samples, 9 different ones, each once" in lines
    assert sum("different ones" in line for line in lines) == 3
    assert len(list((folder / "runs/run/samples").iterdir())) == 3
