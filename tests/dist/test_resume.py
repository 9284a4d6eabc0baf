"""A run that stops and goes on is, at the same layout, bitwise the run that did not stop."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.checkpoint import Checkpoint
from megapipe.cli import parse
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.generate import Generator, find_checkpoint
from megapipe.inference import load_model
from megapipe.layout.resolve import resolve
from megapipe.testing import run_world
from megapipe.train.callbacks.checkpointing import Clock
from tests.parity import reference
from tests.parity.jobs import Job, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import (
    BASE,
    DP,
    HALF,
    STEPS,
    TP,
    VOCABULARY,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
    save_as_loaded,
)
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

CP = {"parallel.dp": "1", "parallel.cp": "4", "context.ulysses": "2"}
CASES = {
    "dp2 pp2 dropout fp32": DP,
    "dp2 pp2 dropout bf16": {**DP, "model.dtype": "bf16"},
    "tp2 pp2 tied fp32": TP,
    "tp2 pp2 tied bf16": {**TP, "model.dtype": "bf16"},
    "dp2 pp2 zero 0": {**DP, "optimizer.zero": "0", "pipeline.chunks": "2",
                       "pipeline.schedule": "interleaved_1f1b"},
    "dp2 pp2 replicated": {**DP, "pipeline.schedule": "chimera"},
    "dp2 pp2 replicated, zero 0": {**DP, "optimizer.zero": "0", "pipeline.schedule": "dualpipe"},
    "dp2 pp2 muon, zero 3": {**DP, "optimizer.rule": "muon", "optimizer.zero": "3",
                             "pipeline.chunks": "2", "pipeline.schedule": "interleaved_1f1b"},
    "dp2 pp2 lion, fp16, zero 2": {**DP, "optimizer.rule": "lion", "model.dtype": "fp16",
                                   "optimizer.zero": "2", "optimizer.loss_scale_window": "3"},
    "dp2 pp2 no masters, disk": {**DP, "model.dtype": "bf16", "optimizer.master_weights": "none",
                                 "optimizer.state_dtype": "bf16", "optimizer.offload": "disk"},
    "dp2 pp2 look ahead": {**DP, "optimizer.weight_prediction": "2"},
    "dp2 pp2 double buffer": {**DP, "pipeline.weight_versions": "double_buffer",
                              "model.tied_embeddings": "false"},
    "tp2 pp2 stash, bf16, muon": {**TP, "pipeline.weight_versions": "stash", "model.dtype": "bf16",
                                  "model.tied_embeddings": "false", "optimizer.rule": "muon",
                                  "optimizer.clip_scope": "stage"},
    "tp2 pp2 slices": {**TP, "model.dropout": "0.1", "pipeline.schedule": "seq1f1b"},
    "cp4 usp, bf16, attention kept": {**CP, "model.dtype": "bf16", "activations.policy": "full",
                                      "activations.keep_attention": "true"},
    "cp2 dp2 zero 3, queries travel": {**CP, "parallel.dp": "2", "parallel.cp": "2",
                                       "context.backward_circulates": "queries",
                                       "context.ulysses": "1", "optimizer.zero": "3"},
}  # fmt: skip


@in_parts("case", CASES, full=["dp2 pp2 muon, zero 3"])
def test_a_resumed_run_is_the_uninterrupted_one_bitwise(case: str, tmp_path: Path) -> None:
    given = CASES[case]
    stopped = Play("parts", given, stop_after=HALF)
    full, _, parts = run(tmp_path, Play("full", given), stopped, Play("parts", given))
    assert parts[0]["first_step"] == HALF
    assert parts[0]["run_id"] != full[0]["run_id"]
    assert_continues(parts, full)
    for step in (HALF, STEPS):
        assert_same_files(checkpoint(tmp_path, "parts", step), checkpoint(tmp_path, "full", step))
    logged = (tmp_path / "runs/parts/log.jsonl").read_text().splitlines()
    steps = [x for x in map(json.loads, logged) if x["kind"] == "step"]
    assert [x["step"] for x in steps] == list(range(1, STEPS + 1))
    assert [x["loss"] for x in steps] == [full[0]["steps"][i].loss for i in range(1, STEPS + 1)]


def test_a_prefix_of_a_run_is_saved_and_goes_on_as_the_whole(tmp_path: Path) -> None:
    """Learning rates included, which decay towards the end of the whole."""
    one = {"parallel.pp": "2"}
    prefix = Play("parts", {**one, "train.stop_after": "3"})
    full, begun, parts = run(tmp_path, Play("full", one), prefix, Play("parts", one), world=2)
    assert sorted(begun[0]["steps"]) == [1, 2, 3]
    assert all(begun[0]["steps"][i] == full[0]["steps"][i] for i in (1, 2, 3))
    assert parts[0]["first_step"] == 3
    assert_continues(parts, full)
    assert "stopped after step 3 of 8" in (tmp_path / "runs/parts/log.jsonl").read_text()


@in_parts("schedule", ["1f1b", "chimera"], full=["chimera"])
def test_another_layout_loads_the_same_state_and_goes_on(schedule: str, tmp_path: Path) -> None:
    """dp2 pp2 with ZeRO 0, perhaps replicated, goes on as tp2 pp2 with ZeRO 1, and back."""
    first = {**DP, "optimizer.zero": "0", "model.dropout": "0", "pipeline.schedule": schedule}
    second = {**TP, "parallel.dp": "1"}
    saved = checkpoint(tmp_path, "full", HALF)
    load = {"checkpoint.load": str(saved)}
    full, moved = run(tmp_path, Play("full", first), Play("moved", {**second, **load}))
    assert moved[0]["first_step"] == HALF
    tensors = Checkpoint.open(saved)
    for rank in moved:
        for name, box, values in rank["loaded"]:
            assert np.array_equal(values, tensors.read(f"model/{name}", box).numpy()), name
    for step, result in moved[0]["steps"].items():
        expected = full[0]["steps"][step]
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert result.lr == expected.lr
    assert moved[0]["validation"] == pytest.approx(full[0]["validation"], rel=1e-6)
    resaved = run_world(
        4, save_as_loaded, {**tiny(tmp_path), **BASE, **second}, str(saved), str(tmp_path / "again")
    )
    assert_same_files(Path(resaved[0]), saved)


def damage(path: Path) -> None:
    """Flip one bit in the middle of the largest shard."""
    shard = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_or_refused(tmp_path: Path) -> None:
    one = {"parallel.pp": "2"}
    (full,) = run(tmp_path, Play("full", one), world=2)
    damage(checkpoint(tmp_path, "full", STEPS))
    (parts,) = run(tmp_path, Play("full", one), world=2)
    assert parts[0]["first_step"] == HALF
    assert_continues(parts, full)
    notes = [
        record["text"]
        for record in map(json.loads, (tmp_path / "runs/full/log.jsonl").read_text().splitlines())
        if record["kind"] == "note"
    ]
    assert any("skipped a damaged checkpoint" in n and f"{STEPS:08d}/" in n for n in notes)
    assert any(n.startswith("resumed from") and f"{HALF:08d}" in n for n in notes)

    damage(checkpoint(tmp_path, "full", HALF))
    for path in (tmp_path / "runs/full/checkpoints").glob(f"step-{STEPS:08d}*"):
        (path / "manifest.json").unlink()
    refused, anew = run(
        tmp_path, Play("full", one), Play("full", {**one, "run.resume": "never"}), world=2
    )
    for rank in refused:
        kind, text = rank["error"]
        assert kind is CheckpointError
        assert "no checkpoint to resume from: " in text
        assert "to start over set run.resume=never" in text
    assert [rank["first_step"] for rank in anew] == [0, 0]
    load = {"checkpoint.load": str(checkpoint(tmp_path, "full", HALF))}
    (refused,) = run(tmp_path, Play("loads", {**one, **load}), world=2)
    for rank in refused:
        kind, text = rank["error"]
        assert kind is CheckpointError
        assert text.startswith("checkpoint.load")
        assert "do not match their checksum" in text


def test_whether_to_resume_can_be_demanded(tmp_path: Path) -> None:
    one = {"parallel.pp": "2", "train.steps": "2", "checkpoint.every": "0"}
    must, never = ({**one, "run.resume": word} for word in ("must", "never"))
    missing, _, refused, ended = run(
        tmp_path, *(Play("run", settings) for settings in (must, never, never, must)), world=2
    )
    for rank in missing:
        assert rank["error"][0] is CheckpointError
        assert "no checkpoint to resume from" in rank["error"][1]
    for rank in refused:
        assert rank["error"][0] is ConfigError
        assert "run.resume" in rank["error"][1]
    for rank in ended:
        assert "the run is finished; to train on, raise train.steps" in rank["finished"]


@in_parts("sign", [signal.SIGUSR1, signal.SIGINT], full=[signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_stops_all(sign: signal.Signals, tmp_path: Path) -> None:
    signalled = Play("parts", DP, preempt=3, sign=sign)
    full, stopped, parts = run(tmp_path, Play("full", DP), signalled, Play("parts", DP))
    for rank in stopped:
        assert rank["error"][0].exit_code == 75
        assert "saved step 3 of 8" in rank["error"][1]
    assert checkpoint(tmp_path, "parts", 3).exists()
    assert parts[0]["first_step"] == 3
    assert_continues(parts, full)


class ThirdTime(Clock):
    """Due when asked for the third time since the last save."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def restart(self) -> None:
        self.asked = 0

    @property
    def due(self) -> bool:
        self.asked += 1
        return self.asked >= 3


class Always(Clock):
    due = True  # type: ignore[assignment]


@in_parts("trust", [False, True], full=[True])
def test_one_clock_decides_when_all_save(trust: bool, tmp_path: Path) -> None:
    """Rank 0's clock does; with validation after the fact it is heard a step later."""
    given = {"parallel.pp": "2", "checkpoint.every": "0", "checkpoint.keep": "9",
             "optimizer.post_validation": str(trust).lower()}  # fmt: skip
    hasty = functools.partial(Always, 1.0)
    (ranks,) = run(tmp_path, Play("run", given, clocks=(ThirdTime, hasty)), world=2)
    assert [rank["error"] for rank in ranks] == [None] * 2
    saved = sorted(path.name for path in (tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in ((4, 8) if trust else (3, 6, 8))]


def test_the_clock() -> None:
    assert not Clock(0).due
    assert Clock(1e-9).due
    assert not Clock(3600).due


@in_parts("every", ["1", "5"], full=["5"])
def test_a_signal_stops_a_run_that_validates_after_the_fact(every: str, tmp_path: Path) -> None:
    """At the step of the signal if that is settled, otherwise at the next."""
    later = {**DP, "optimizer.post_validation": "true", "checkpoint.every": every}
    (stopped,) = run(tmp_path, Play("parts", later, preempt=3))
    last = 3 if every == "1" else 4
    for rank in stopped:
        assert rank["error"][0].exit_code == 75
        assert f"saved step {last} of 8" in rank["error"][1]


def test_a_checkpoint_of_another_update_rule_is_refused(tmp_path: Path) -> None:
    """muon's state has adamw's names, and means something else."""
    load = {"checkpoint.load": str(checkpoint(tmp_path, "muon", HALF))}
    muon = {**DP, "optimizer.rule": "muon", "optimizer.max_grad_norm": "null"}
    _, other = run(tmp_path, Play("muon", muon), Play("adamw", {**DP, **load}))
    for rank in other:
        assert (
            "was made with optimizer.rule=muon, but the configuration has adamw" in rank["error"][1]
        )


def test_another_number_of_threads_at_a_resume_is_told(tmp_path: Path) -> None:
    given, two = arguments(tiny(tmp_path)), {"OMP_NUM_THREADS": "2"}
    assert run_forked(tmp_path, 1, *given, "train.stop_after=1", environ=two).codes == [0]
    stored = Checkpoint.open(checkpoint(tmp_path, "run", 1)).manifest.coordinates
    assert stored["threads"] == 2
    again = run_forked(tmp_path, 1, *given)
    assert again.codes == [0]
    assert again.text.count("threads of a process (OMP_NUM_THREADS) were 2 and are 1: ") == 1


def test_a_signalled_job_exits_with_75_and_says_so_once(tmp_path: Path) -> None:
    endless = {"train.steps": "1000000", "optimizer.schedule": "constant", "log.every": "100000"}
    given = arguments({**tiny(tmp_path), **endless, "parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes[1].send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by a signal; saved step")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dp2 pp2 dropout fp32", "tp2 pp2 tied fp32"])
def test_generation_computes_what_the_reference_does(case: str, tmp_path: Path) -> None:
    run(tmp_path, Play("run", CASES[case], stop_after=HALF))
    folder = checkpoint(tmp_path, "run", HALF)
    model = load_model(find_checkpoint(tmp_path / "runs/run"), torch.device("cpu"))
    saved = Checkpoint.open(folder)
    params = {
        name.removeprefix("model/"): saved.read(name)
        for name in saved.names()
        if name.startswith("model/")
    }
    ids = list(b"the cat sat")
    config = model.source.model.model_copy(update={"dropout": 0.0})
    expected = reference.logits(params, config, torch.tensor([ids]))[0, -1, :VOCABULARY]
    logits = Generator(model).read([ids], room=1).logits()[0, :VOCABULARY]
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
    text = ["--prompt", "the cat", "--max-new-tokens", "5", "--temperature", "0"]
    outcome = run_forked(tmp_path, 1, str(folder), *text, script="scripts/generate.py")
    assert outcome.codes == [0]
    assert outcome.text.startswith("the cat")


def test_the_run_folder_tells_what_ran(tmp_path: Path) -> None:
    """Reports switched on, no account, no network."""
    given = {**tiny(tmp_path), "log.tensorboard": "true", "log.wandb": "offline"}
    outcome = run_forked(tmp_path, 1, *arguments(given))
    assert outcome.codes == [0], outcome.text
    assert "does not accept records" not in outcome.text
    folder = tmp_path / "runs/run"
    tokenizer = load_tokenizer("byte")
    resolved, _ = resolve(parse(arguments(given)).config, 1, tokenizer.vocab_size)
    assert parse([str(folder / "config.yaml")]).config == resolved
    assert json.loads((folder / "provenance.json").read_text())["versions"]["torch"]
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3]
    assert [r["step"] for r in records if r["kind"] == "validation"] == [3]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["loss_last"] == [r for r in records if r["kind"] == "step"][-1]["loss"]
    assert list((folder / "tensorboard").glob("events*"))
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
