"""Runs that begin from Hugging Face folders and from weights, and exports of any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.find import find_checkpoint
from megapipe.convert import HuggingFaceFolder, export
from megapipe.convert.commands import main
from megapipe.errors import CheckpointError, ConfigError
from megapipe.model.gpt.hf.rope import PARTIAL_ROPE, ROPE
from megapipe.model.gpt.hf.table import TABLE
from megapipe.testing import World, run_world
from tests.parity.converted import write_checkpoint
from tests.parity.first_step import first_loss
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.reference import init_random
from tests.parity.stopped_runs import (
    BASE,
    STEPS,
    TP,
    Play,
    checkpoint,
    play_all,
    run,
    save_as_loaded,
)
from tests.unit.model.transformers_models import model_of

pytestmark = pytest.mark.full

LAYOUT = {"parallel.dp": "2", "parallel.tp": "2", "parallel.pp": "2"}
BATCH = 8


def write_folder(folder: Path, case: str, **changes: Any) -> dict[str, str]:
    """Write ``folder/hf`` with random weights; return the settings of a run of the model that
    begins from it."""
    model = model_of(case).model_copy(
        update={"dtype": "fp32", "vocab_size": 257, "layers": 4, **changes}
    )
    params = init_random(model, seed=5, dtype=torch.float32)
    export(write_checkpoint(folder / "source", model, params), folder / "hf", shard_bytes=40_000)
    return {
        key: str(value)
        for key, value in HuggingFaceFolder.open(folder / "hf").config.items()
        if value is not None
    } | {"checkpoint.load": str(folder / "hf")}


def test_a_run_from_a_folder_has_the_loss_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two commands of docs/models.md, at tp 2: 257 tokens are padded."""
    write_folder(tmp_path, "llama_gqa")
    assert main(["inspect", str(tmp_path / "hf"), "--config"]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    given = {k: v for k, v in {**tiny(tmp_path), **BASE}.items() if not k.startswith("model.")}
    argv = [str(tmp_path / "model.yaml"), *arguments(given), "data.tokenizer=byte"]
    ranks = run_world(2, first_loss, [*argv, "parallel.tp=2"])
    loss, (tokens, labels, mask) = ranks[0]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logits = hf(torch.from_numpy(tokens)).logits.double()
    losses = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), reduction="none"
    )
    expected = losses[torch.from_numpy(mask).flatten().bool()].mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert [rank[0] for rank in ranks] == [loss, loss]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_checkpoints_of_any_layout_export_to_the_same_bytes(tmp_path: Path) -> None:
    """A step of one process, saved again by dp 2 x tp 2 x pp 2."""
    run(tmp_path, Play("one", {"train.stop_after": "1"}), world=1)
    source = checkpoint(tmp_path, "one", 1)
    settings = {**tiny(tmp_path), **BASE, **LAYOUT}
    again = run_world(8, save_as_loaded, settings, str(source), str(tmp_path / "again"))
    layouts = []
    for path, name in ((source, "a"), (Path(again[0]), "b")):
        opened = Checkpoint.open(path)
        layouts.append(opened.manifest.layout)
        export(opened, tmp_path / name, shard_bytes=30_000)
    assert layouts[1] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "chunks": 1} != layouts[0]
    assert len(files_of(tmp_path / "a")) > 6
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        ("qwen3_moe", {"parallel.ep": "2"}),
    ],
)
def test_each_rank_reads_what_it_holds(case: str, layout: dict[str, str], tmp_path: Path) -> None:
    """Afterwards the run goes on from a checkpoint of its own."""
    model = write_folder(tmp_path, case) | layout
    begun, went_on = run(
        tmp_path,
        Play("run", {**model, **TP, "train.stop_after": "1"}),
        Play("run", {**model, **TP, "train.stop_after": "2"}),
    )
    folder = HuggingFaceFolder.open(tmp_path / "hf")
    for rank in begun:
        assert rank["error"] is None
        assert rank["loaded"]
        for name, region, values in rank["loaded"]:
            assert np.array_equal(values, folder.read(f"model/{name}", region).numpy()), name
    samples = set().union(*(rank.get("samples", set()) for rank in begun))
    assert samples == set(range(8)), "from the first sample on"
    assert [rank["first_step"] for rank in went_on] == [1] * 4
    assert began_with(tmp_path, "run") == str(tmp_path / "hf")


def test_exports_during_a_run_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    """Over two starts."""
    every = {"parallel.tp": "2", "checkpoint.export_every": "3", "checkpoint.every": "0"}
    first, second = run(
        tmp_path,
        Play("run", {**every, "train.stop_after": "3"}),
        Play("run", every),
        world=2,
    )
    assert [rank["error"] for rank in (*first, *second)] == [None] * 4
    exports = sorted(path.name for path in (tmp_path / "runs/run/exports").iterdir())
    assert exports == ["step-00000003", "step-00000006"]
    for name in exports:
        source = Checkpoint.open(tmp_path / "runs/run/checkpoints" / name)
        export(source, tmp_path / name, dtype="bf16")
        assert files_of(tmp_path / name) == files_of(tmp_path / "runs/run/exports" / name)
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs/run/exports" / exports[0])


def play_with_a_wrong_table(world: World, *given: Any) -> list[dict[str, Any]]:
    """Play a rank on which Llama's class rotates a share of a head's values."""
    row = TABLE["llama"]
    parts = tuple(PARTIAL_ROPE if part is ROPE else part for part in row.parts)
    TABLE["llama"] = replace(row, parts=parts)
    return play_all(world, *given)


def test_an_export_that_is_another_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    llama = {
        "model.norm": "rmsnorm",
        "model.positions": "rotary",
        "model.activation": "swiglu",
        "model.bias": "false",
        "model.tied_embeddings": "false",
    }
    settings = {**llama, "model.rope.percent": "0.5", "checkpoint.export_every": "3"}
    base = {**tiny(tmp_path), **BASE}
    for ranks in run_world(2, play_with_a_wrong_table, base, [Play("run", settings)]):
        ((kind, text),) = (rank["error"] for rank in ranks)
        assert kind is ConfigError
        told = "checkpoint.export_every=3: rope_parameters.partial_rotary_factor = 0.5: "
        assert text.startswith(told)
    assert not (tmp_path / "runs/run/exports").exists()
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_weights_full_checkpoints_and_exports_of_one_run(tmp_path: Path) -> None:
    """An adopted model's folder is that of the run: its weights begin it and stay, what it saves is
    gone on from and outdated, and all exports stay."""
    given = write_folder(tmp_path, "qwen2")
    del given["checkpoint.load"]
    adopted, root = tmp_path / "runs/run", tmp_path / "runs/run/checkpoints"
    command = ["hf-to-megapipe", str(tmp_path / "hf"), str(adopted), "--tokenizer", "byte"]
    assert main(command) == 0
    given |= {"checkpoint.every": "1", "checkpoint.keep": "1", "checkpoint.export_every": "1"}
    (begun,), (went_on,) = run(
        tmp_path,
        Play("run", {**given, "train.stop_after": "1"}),
        Play("run", {**given, "train.stop_after": "4"}),
        world=1,
    )
    assert begun["error"] is went_on["error"] is None
    assert began_with(tmp_path, "run") == str(root / "step-00000000")
    for name, region, values in begun["loaded"]:
        found = Checkpoint.open(root / "step-00000000").read(f"model/{name}", region)
        assert np.array_equal(values, found.numpy()), name
    assert (begun["first_step"], went_on["first_step"]) == (0, 1)
    kept = [f"step-{step:08d}" for step in (0, 3, 4)]
    assert sorted(path.name for path in root.glob("step-*")) == kept
    exports = sorted(path.name for path in (adopted / "exports").iterdir())
    assert exports == [f"step-{step:08d}" for step in range(1, 5)]
    assert main(["megapipe-to-hf", str(adopted), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert files_of(tmp_path / "out") == files_of(adopted / "exports" / exports[-1])


def test_how_a_run_goes_on_otherwise_than_its_folder_is_told(tmp_path: Path) -> None:
    given = write_folder(tmp_path, "qwen3_moe")
    assert given["model.moe.aux_loss_coeff"] == "0.01"
    changed = {**given, "model.moe.aux_loss_coeff": "0.03", "train.stop_after": "1"}
    run(tmp_path, Play("run", changed), Play("same", {**given, "train.stop_after": "1"}), world=1)
    told = f"trains with model.moe.aux_loss_coeff=0.03, where {tmp_path / 'hf'} has 0.01: set "
    assert f"{told}model.moe.aux_loss_coeff=0.01 to train with that" in notes_of(tmp_path, "run")
    assert not [line for line in notes_of(tmp_path, "same") if "moe.aux_loss_coeff" in line]


def notes_of(folder: Path, name: str) -> list[str]:
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    return [x["text"] for x in map(json.loads, lines) if x["kind"] == "note"]


def began_with(folder: Path, name: str) -> str:
    begins = "starts with the weights of "
    (found,) = (line for line in notes_of(folder, name) if line.startswith(begins))
    return found.removeprefix(begins)


@pytest.mark.slow
def test_weights_of_another_run(tmp_path: Path) -> None:
    """With another update rule and another order of the data; by its folder, and as the latest."""
    old = {"optimizer.rule": "lion", "train.stop_after": "2"}
    weights = {"checkpoint.load_only": "weights", "run.seed": "99"}
    named = {**weights, "checkpoint.load": str(tmp_path / "runs/old")}
    latest = {**weights, "checkpoint.load": "latest"}
    wrong = {**named, "checkpoint.load_only": "all"}
    outcomes = run(
        tmp_path,
        Play("old", old),
        Play("named", {**named, "train.stop_after": "1"}),
        Play("newest", {**latest, "parallel.tp": "2", "parallel.dp": "1"}),
        Play("again", {"checkpoint.load": "latest", "run.seed": "99"}),
        Play("refused", {**wrong}),
        Play("deeper", {**named, "model.layers": "5", "model.norm": "rmsnorm"}),
        world=2,
    )
    old_run, by_name, by_latest, again, refused, deeper = (ranks[0] for ranks in outcomes)
    assert old_run["error"] is by_name["error"] is by_latest["error"] is None
    source = Checkpoint.open(checkpoint(tmp_path, "old", 2))
    saved = find_checkpoint(tmp_path / "runs/named")
    for outcome, opened in ((by_name, source), (by_latest, saved)):
        assert outcome["first_step"] == 0
        assert 1 in outcome["steps"]
        for name, region, values in outcome["loaded"]:
            assert np.array_equal(values, opened.read(f"model/{name}", region).numpy()), name
    assert sorted(by_latest["steps"]) == list(range(1, STEPS + 1))
    assert min(by_latest["samples"]) == 0
    assert again["error"][0] is ConfigError  # all of it: the latest is at its end
    assert "leaves nothing to do" in again["error"][1]
    assert refused["error"][0] is CheckpointError
    assert "optimizer.rule=lion" in refused["error"][1]
    assert deeper["error"][0] is CheckpointError
    for words in ("model.layers is 5, stored is 4", "model.norm is rmsnorm, stored is layern"):
        assert words in deeper["error"][1]


Wrong = tuple[Mapping[str, str], type[Exception], str]


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The same line on every rank."""
    given = write_folder(tmp_path, "llama")
    (tmp_path / "none").mkdir()
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/config.json").write_text('{"model_type": "opt"}')
    (tmp_path / "cut").mkdir()
    for path in sorted((tmp_path / "hf").iterdir()):
        if "-00002-of-" not in path.name:
            (tmp_path / "cut" / path.name).write_bytes(path.read_bytes())
    cases: list[Wrong] = [
        ({"model.ffn_hidden": "48"}, CheckpointError, "ffn_hidden is 48, stored is 40; megapipe"),
        ({"checkpoint.load": "latest"}, CheckpointError, "checkpoint.load: latest: no run in"),
        ({"checkpoint.load": str(tmp_path / "none")}, CheckpointError, "is neither a checkpoint"),
        ({"checkpoint.load": str(tmp_path / "opt")}, ConfigError, "model_type 'opt' is not"),
        (
            {"checkpoint.load": str(tmp_path / "cut")},
            CheckpointError,
            "model-00002-of-00004.safetensors is missing",
        ),
    ]
    plays = [Play("bad", {**given, **wrong}) for wrong, *_ in cases]
    settings = {**tiny(tmp_path), **BASE}
    first, second = run_world(2, play_all, settings, plays)
    assert [x["error"] for x in first] == [x["error"] for x in second]
    for outcome, (_, kind, words) in zip(first, cases, strict=True):
        assert outcome["error"][0] is kind
        assert words in outcome["error"][1], outcome["error"]
    wrong = arguments({**settings, **given, "checkpoint.load": str(tmp_path / "cut")})
    run_forked(tmp_path, 2, *wrong).assert_one_line(5, "checkpoint.load", "is missing")
