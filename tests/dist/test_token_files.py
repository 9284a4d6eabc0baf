"""Runs on a token file, from the command that writes it to a start elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parity.jobs import arguments, tiny, write_corpus
from tests.parity.launches import run_forked


def settings(folder: Path, prefix: Path) -> dict[str, str]:
    given = {**tiny(folder), "data.source": str(prefix), "train.steps": "4"}
    del given["data.cache"]
    return given


def losses(folder: Path) -> list[float]:
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        write_corpus(texts / f"{number}.txt", 50 + number)
    output = tmp_path / "data" / "x.v2"
    given = ["--source", str(texts), "--output", str(output)]
    outcome = run_forked(tmp_path, 1, *given, script="scripts/prepare_data.py")
    assert set(outcome.codes) == {0}, outcome.text
    assert "20 documents" in outcome.text
    assert "bytes of text, " in outcome.text
    return output


@pytest.mark.slow
def test_layouts_and_places_change_nothing(prefix: Path, tmp_path: Path) -> None:
    """One process; and two replicas that go on as two stages, from a copy in another place."""
    for name in ("alone", "several"):
        (tmp_path / name).mkdir()
    alone, several = tmp_path / "alone", tmp_path / "several"
    outcome = run_forked(alone, 1, *arguments(settings(alone, prefix)))
    assert set(outcome.codes) == {0}, outcome.text

    first = {**settings(several, prefix), "parallel.dp": "2", "train.stop_after": "2"}
    outcome = run_forked(several, 2, *arguments(first))
    assert set(outcome.codes) == {0}, outcome.text
    moved = tmp_path / "moved"
    for suffix in (".bin", ".idx"):
        prefix.with_name(prefix.name + suffix).rename(moved.with_name(f"moved{suffix}"))
    then = {**settings(several, moved), "parallel.pp": "2", "data.source": f"{moved}.idx"}
    outcome = run_forked(several, 2, *arguments(then))
    assert set(outcome.codes) == {0}, outcome.text
    assert "resumed from" in outcome.text
    assert losses(several) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(alone)) == 4


def test_a_key_for_texts_is_refused(prefix: Path, tmp_path: Path) -> None:
    given = {**settings(tmp_path, prefix), "data.text_field": "content"}
    outcome = run_forked(tmp_path, 1, *arguments(given))
    outcome.assert_one_line(2, "data.text_field=content has no effect", "is a token file")


def test_a_half_of_the_file_is_missed(prefix: Path, tmp_path: Path) -> None:
    prefix.with_name(prefix.name + ".idx").unlink()
    outcome = run_forked(tmp_path, 2, *arguments(settings(tmp_path, prefix)), "parallel.dp=2")
    outcome.assert_one_line(3, f"token file {prefix}.idx: No such file")
