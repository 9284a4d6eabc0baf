"""Checkpoints and Hugging Face folders that cannot be loaded, run folders that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapipe.config.moe import MoEConfig
from megapipe.convert import export
from tests.parity.bad_folder import (
    LONG,
    MODEL,
    cut_off,
    gone,
    in_config,
    in_shard,
    text,
    with_manifest,
)
from tests.parity.bad_input.case import Bad, all_of, link, made, mode
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random

RUN = "runs/run"
RUN_LOAD = "checkpoint.load=run checkpoint.load_only=weights"


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the manifest of the checkpoint in ``run``, as its writer would have written it."""

    def edited(content: bytes) -> bytes:
        manifest = json.loads(content)
        change(manifest)
        return json.dumps(manifest).encode()

    return with_manifest(edited)


def with_experts(folder: Path) -> None:
    """Replace the checkpoint in ``run`` by one of the same model with 4 experts, and the folder
    ``hf`` by its export."""
    for name in ("run", "hf"):
        shutil.rmtree(folder / name)
    moe = MoEConfig(num_experts=4, expert_ffn_hidden=12, topk_groups=1)
    model = MODEL.model_copy(update={"moe": moe})
    parameters = init_random(model, seed=5, dtype=torch.float32)
    export(write_checkpoint(folder / "run", model, parameters), folder / "hf")


def own_run(folder: Path) -> None:
    """Put another model's checkpoint into the run folder."""
    (folder / "runs").mkdir()
    (folder / "run").rename(folder / RUN)


def binary_config(folder: Path) -> None:
    (folder / "hf/config.json").write_bytes(b"\xff\xfe\0")


CHECKPOINTS = [
    Bad("load of nothing", "checkpoint.load=./gone", 5, ("checkpoint.load: ./gone: no such",)),
    Bad("load of nothing by a URL", "checkpoint.load=memory://gone/run", 5,
        ("checkpoint.load: memory://gone/run is neither a checkpoint",)),
    Bad("checkpoints where fsspec has no way", "checkpoint.url=nothing://x/y", 5,
        ("checkpoint.url=nothing://x/y: Protocol not known",)),
    Bad("load of a file", "checkpoint.load=texts.txt", 5,
        ("checkpoint.load: texts.txt: no such folder",),
        before_groups=True),
    Bad("load of a long name", f"checkpoint.load={LONG}", 5, ("nnn: no such folder",)),
    Bad("load of an empty folder", "checkpoint.load=empty", 5,
        ("checkpoint.load: ", "empty is neither a checkpoint", "config.json")),
    Bad("load of a tokenizer", "checkpoint.load=bpe", 5, ("bpe is neither a checkpoint",)),
    Bad("load of the latest of none", "checkpoint.load=latest", 5, ("no run in",)),
    Bad("load of a manifest that is empty", RUN_LOAD, 5, ("no checkpoint is intact: run/check",),
        with_manifest(lambda content: b"")),
    Bad("load of a manifest that is cut off", RUN_LOAD, 5, ("intact: run/checkpoints/",),
        with_manifest(lambda content: content[:-9])),
    Bad("load of a manifest that is none", RUN_LOAD, 5,
        ("intact: run/checkpoints/",), with_manifest(lambda _: b"[]")),
    Bad("load of a manifest with another content", RUN_LOAD, 5, ("intact: run/checkpoints/",),
        in_manifest(lambda manifest: manifest.update(step=7))),
    Bad("load of a checkpoint with a missing file", RUN_LOAD, 5,
        ("intact: cannot read run/checkpoints/", "safetensors: No such file"),
        lambda folder: next(folder.glob("run/checkpoints/*/*.safetensors")).unlink()),
    Bad("load of a checkpoint that is cut off", RUN_LOAD, 5,
        ("checkpoint.load: ", "no checkpoint is intact"),
        cut_off("run/checkpoints/*/*.safetensors", 3)),
    Bad("load of a checkpoint that must not be read", RUN_LOAD, 5, ("Permission denied",),
        lambda folder: next(folder.glob("run/checkpoints/*/*.safetensors")).chmod(0),
        privileged=False),
    Bad("load of another model's checkpoint", RUN_LOAD, 5,
        ("checkpoint.load: run/checkpoints/step-00000003 belongs to another model", "--config"),
        before_groups=True),
    Bad("load of an unknown family", "checkpoint.load=hf", 2, ("checkpoint.load: ", "'opt'"),
        in_config(model_type="opt"),
        before_groups=True),
    Bad("load of a missing shard", "checkpoint.load=hf", 5, ("shard model-00002",),
        gone("hf/model-00002-of-00002.safetensors"),
        before_groups=True),
    Bad("load of a shard that is cut off", "checkpoint.load=hf", 5,
        ("model-00002-of-00002.safetensors is not a complete",),
        cut_off("hf/model-00002-of-00002.safetensors", 40)),
    Bad("load of another model of Hugging Face's", "checkpoint.load=hf", 5,
        ("checkpoint.load: hf belongs to another model", "model.norm is layernorm, stored is rmsn",
         "--config"),
        before_groups=True),
    Bad("load of a config that is no JSON", "checkpoint.load=hf", 5, ("config.json is not JSON",),
        text("hf/config.json", "{")),
    Bad("load of a config that is no text", "checkpoint.load=hf", 5, ("config.json",),
        binary_config),
    Bad("load of a config with a wrong type", "checkpoint.load=hf", 2,
        ("config.json", "hidden_size"), in_config(hidden_size="wide")),
    Bad("load of a tensor of another shape", "checkpoint.load=hf", 5,
        ("tensor lm_head.weight has shape [3, 4]; config.json asks for [257, 24]",),
        in_shard(lambda state: state.update({"lm_head.weight": torch.ones(3, 4)}))),
    Bad("load of a tensor of integers", "checkpoint.load=hf", 5,
        ("lm_head.weight is I32", "BF16, F16, F32, F64"),
        in_shard(lambda state: state.update({"lm_head.weight": state["lm_head.weight"].int()}))),
    Bad("load of a checkpoint with another number of experts",
        f"{RUN_LOAD} model.moe.num_experts=8", 5,
        ("step-00000003 belongs to", "model.moe.num_experts is 8, stored is 4"), with_experts,
        before_groups=True),
    Bad("load of Hugging Face's model with another number of experts",
        "checkpoint.load=hf model.moe.num_experts=8", 5,
        ("checkpoint.load: hf belongs to another model", "model.moe.num_experts is 8, stored is 4"),
        with_experts,
        before_groups=True),
    Bad("load of a router that cannot be expressed", "checkpoint.load=hf", 2,
        ("config.json: router_jitter_noise = 0.1", "mixtral"),
        all_of(with_experts, in_config(router_jitter_noise=0.1)),
        before_groups=True),
    Bad("go on with another model's checkpoint", "train.steps=9", 5, ("runs/run", "model.hidden"),
        own_run),
    Bad("never go on, and there is a checkpoint", "run.resume=never", 2,
        ("runs/run already has the checkpoint", "choose another run.name"), own_run),
]  # fmt: skip
FOLDERS = [
    Bad("a file where the runs should be", "run.folder=texts.txt", 2,
        ("run.folder: cannot write to texts.txt/run",)),
    Bad("a file above the runs", "run.folder=texts.txt/x", 2, ("run.folder: cannot write",)),
    Bad("a file where the run should be", "run.folder=.  run.name=texts.txt", 2,
        ("run.folder: cannot write to texts.txt", "File exists")),
    Bad("a folder that must not be written", "run.folder=locked", 2,
        ("run.folder: cannot write to locked/run: Permission denied",),
        all_of(made("locked"), mode("locked", 0o500)), privileged=False),
    Bad("a run folder that must not be read", "", 2, ("run.folder: ", "Permission denied"),
        all_of(made(RUN), mode(RUN, 0o300)), privileged=False),
    Bad("latest is a folder", "", 2, ("checkpoints/latest is a folder: expected a file",),
        made(f"{RUN}/checkpoints/latest")),
    Bad("summary.json is a folder", "", 2, ("summary.json is a folder: expected a file",),
        made(f"{RUN}/summary.json")),
    Bad("log.jsonl is a folder", "", 2, ("log.jsonl is a folder: expected a file",),
        made(f"{RUN}/log.jsonl")),
    Bad("checkpoints is a file", "", 2, ("run/checkpoints is a file: expected a folder",),
        all_of(made(RUN), text(f"{RUN}/checkpoints", ""))),
    Bad("checkpoints is a link", "", 2, ("checkpoints is a symbolic link", "remove it"),
        link(f"{RUN}/checkpoints", "../../empty")),
    Bad("log.jsonl is a link", "", 2, ("log.jsonl is a symbolic link",),
        link(f"{RUN}/log.jsonl", "../../../outside")),
    Bad("a link to nothing", "", 2, ("samples is a symbolic link",),
        link(f"{RUN}/samples", "/gone/samples")),
    Bad("latest is a link", "", 2, ("latest is a symbolic link",),
        link(f"{RUN}/checkpoints/latest", "../../../outside")),
    Bad("a checkpoint is a link", "", 2, ("step-00000003 is a symbolic link",),
        link(f"{RUN}/checkpoints/step-00000003", "../../../run")),
]  # fmt: skip
BAD_FOLDERS = [*CHECKPOINTS, *FOLDERS]
