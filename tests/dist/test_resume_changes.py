"""A run that goes on with other settings: what it says, what it refuses, where its data go on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.errors import CheckpointError, ConfigError
from megapipe.observe.summary import next_commands
from tests.parity.jobs import arguments, tiny, write_corpus
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import Play, run

pytestmark = pytest.mark.full

ONE = {"parallel.pp": "1", "model.layers": "1", "train.validate_every": "0"}


def notes_of(folder: Path, name: str) -> list[str]:
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    return [x["text"] for x in map(json.loads, lines) if x["kind"] == "note"]


def test_another_global_batch_neither_repeats_nor_skips_samples(tmp_path: Path) -> None:
    """8 samples in each of 3 steps, then 12 in each of 2, then 4 in 3 steps."""
    batches = [("8", "3"), ("12", "5"), ("4", "8")]
    plays = [
        Play("run", {**ONE, "train.global_batch": batch, "train.stop_after": last})
        for batch, last in batches
    ]
    parts = [part for (part,) in run(tmp_path, *plays, world=1)]
    assert [part["error"] for part in parts] == [None] * 3
    assert [part["samples"] for part in parts] == [
        set(range(24)), set(range(24, 48)), set(range(48, 60))
    ]  # fmt: skip
    notes = notes_of(tmp_path, "run")
    assert "changed since: train.global_batch was 8 and is 12" in notes
    assert any(note.endswith("at step 5 of 8, sample 48") for note in notes)


def test_another_seed_or_corpus_is_refused_or_begins_its_data_anew(tmp_path: Path) -> None:
    begun = {**ONE, "train.stop_after": "2"}
    other, moved = (write_corpus(tmp_path / "other.txt", 5000), tmp_path / "moved.txt")
    allow = {"run.resume_changes": "allow"}
    seed, corpus = {"run.seed": "7"}, {"data.source": str(other)}
    write_corpus(moved)
    first, no_seed, no_corpus, copied, anew = (
        part
        for (part,) in run(
            tmp_path,
            Play("run", begun),
            Play("run", {**ONE, **seed}),
            Play("run", {**ONE, **corpus}),
            Play("run", {**ONE, "data.source": str(moved), "train.stop_after": "3"}),
            Play("run", {**ONE, **seed, **corpus, **allow, "train.stop_after": "4"}),
            world=1,
        )
    )
    assert first["error"] is None
    for part, word in ((no_seed, "run.seed was 1234 and is 7"), (no_corpus, "corpus was ")):
        assert part["error"][0] is CheckpointError
        assert word in part["error"][1]
    assert copied["error"] is None
    assert copied["samples"] == set(range(16, 24)), "the same corpus elsewhere goes on"
    assert anew["error"] is None
    assert anew["samples"] == set(range(8))
    assert any(note.startswith("changed since: corpus was") for note in notes_of(tmp_path, "run"))


def test_the_record_of_a_run_is_kept(tmp_path: Path) -> None:
    """A start that does nothing keeps the record; one that goes on adds its own."""
    settings = {**ONE, "train.stop_after": "2"}
    more = {**ONE, "train.stop_after": "3", "optimizer.lr": "0.5"}
    beyond = {**ONE, "train.steps": "2", "optimizer.schedule": "constant"}
    begun, idle, went_on, past = (
        part
        for (part,) in run(
            tmp_path,
            Play("run", settings),
            Play("run", {**settings, "log.every": "5"}),
            Play("run", more),
            Play("run", beyond),
            world=1,
        )
    )
    assert begun["error"] is None
    assert "train.stop_after=2: to train on, raise it or set it to null" in idle["finished"]
    assert went_on["error"] is None
    assert past["error"][0] is ConfigError
    assert "is of step 3, where train.steps=2 leaves nothing to do" in past["error"][1]
    folder = tmp_path / "runs/run"
    files = {path.name for path in folder.glob("*") if path.suffix in (".yaml", ".json")}
    record = {"config.yaml", "provenance.json"}
    added = {"config-step-00000002.yaml", "provenance-step-00000002.json"}
    assert files - {"summary.json"} == record | added
    assert parse([str(folder / "config.yaml")]).config.log.every == 1
    assert parse([str(folder / "config-step-00000002.yaml")]).config.optimizer.lr == 0.5


def test_the_command_to_go_on_does_after_a_part_after_the_whole_and_again(tmp_path: Path) -> None:
    """It keeps what later starts have changed."""
    given = {**tiny(tmp_path), **ONE, "train.steps": "4", "train.stop_after": "2"}
    words, folder = arguments(given), tmp_path / "runs/run"
    for steps in ("2/4", "4/4", "8/8"):
        done = run_forked(tmp_path, 1, *words)
        assert done.codes == [0], done.text
        assert f" step {steps} " in done.text
        command = shlex.split(next_commands(folder)["to continue"])
        words = command[command.index("train") + 1 :]
        if steps == "2/4":
            words.append("optimizer.lr=0.004")
    further = parse(words).config
    assert (further.train.last_step, further.optimizer.lr) == (16, 0.004)
