"""50 steps from equal weights over the same token file: megapipe at dp 2 x tp 2 x pp 2, a plain
loop with transformers, and megatron-core in the same layout. Settings and results are in
docs/comparison.md (``pytest -rP`` prints the results)."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megapipe.convert.commands import main
from megapipe.launch.local import spawn
from tests.external import megatron_loop, plain_loop
from tests.external.megatron_datasets import training_rows
from tests.external.recipe import Outcome, Recipe, write_model, write_tokens
from tests.parity.jobs import arguments, run_launched


def megapipe_run(recipe: Recipe, folder: Path, model: Path, tokens: Path) -> Outcome:
    """Run the user's command, and export its checkpoint to a folder."""
    settings = {
        "run.folder": folder / "runs",
        "run.name": "ours",
        "run.seed": recipe.seed,
        "checkpoint.load": model,
        "checkpoint.load_only": "weights",
        "model.dtype": "fp64" if recipe.wide else "fp32",
        "data.source": tokens,
        "data.tokenizer": "byte",
        "data.sample_format": "megatron",
        "data.split": recipe.split,
        "data.cache": folder / "cache",
        "parallel.dp": recipe.dp,
        "parallel.tp": recipe.tp,
        "parallel.pp": recipe.pp,
        "train.steps": recipe.steps,
        "train.sequence_length": recipe.sequence,
        "train.global_batch": recipe.batch,
        "train.microbatch": recipe.microbatch,
        "train.validate_every": 0,
        "optimizer.rule": "adamw",
        "optimizer.lr": recipe.lr,
        "optimizer.min_lr": recipe.min_lr,
        "optimizer.warmup_steps": recipe.warmup,
        "optimizer.schedule": "cosine",
        "optimizer.options.betas": [recipe.beta1, recipe.beta2],
        "optimizer.options.eps": recipe.eps,
        "optimizer.weight_decay": recipe.weight_decay,
        "optimizer.max_grad_norm": recipe.clip,
        "optimizer.zero": 1,
    }
    given = [str(folder / "model.yaml"), *arguments({k: str(v) for k, v in settings.items()})]
    outcome = run_launched(folder, recipe.world, *given, limit_s=180)
    assert set(outcome.codes) == {0}, outcome.text
    lines = map(json.loads, (folder / "runs/ours/log.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    export = ["megapipe-to-hf", str(folder / "runs/ours"), str(folder / "out")]
    assert main([*export, "--tokenizer", "none"]) == 0
    weights = load_file(folder / "out/model.safetensors")
    return Outcome([s["loss"] for s in steps], [s["grad_norm"] for s in steps], weights)


CASES = [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True)]
OF_KEYS = ("c_attn.bias", "linear_qkv.bias")
"""Ends of names of biases that include key biases. These change no loss: their gradient is rounding
error alone, which Adam magnifies unless it is far below eps."""


@pytest.mark.parametrize(
    ("family", "wide"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} {'fp64' if case[1] else 'fp32'}",
            marks=pytest.mark.slow if number else pytest.mark.full,
        )
        for number, case in enumerate(CASES)
    ],
)
def test_the_same_curve(
    family: str, wide: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and weights are compared absolutely, gradient norms relatively; each largest
    difference is printed."""
    recipe = Recipe(family, wide=wide)
    model, tokens = write_model(recipe.model, tmp_path / "model"), write_tokens(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(model), "--config"]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    samples = recipe.steps * recipe.batch
    rows = training_rows(tokens, recipe.seed, recipe.sequence, recipe.split, samples)

    ours = megapipe_run(recipe, tmp_path, model, tokens)
    plain = plain_loop.train(recipe, model, rows)
    (tmp_path / "other").mkdir()
    save_file(dict(ours.weights), tmp_path / "other/model.safetensors")
    # forks of this process, which has loaded megatron-core
    ranks = spawn(megatron_loop.train, recipe.world, recipe, model, rows, tmp_path / "other")
    of_last_stage = [rank.losses for rank in ranks if rank.losses]
    megatron = [mean(losses) for losses in zip(*of_last_stage, strict=True)]

    assert all(rank.norms == ranks[0].norms for rank in ranks)
    assert ours.weights.keys() == plain.weights.keys()
    assert min(ours.norms) < recipe.clip < max(ours.norms)
    assert ours.losses[-1] < ours.losses[0] - 1
    weights = [(name, (plain.weights[name] - w).abs().max()) for name, w in ours.weights.items()]
    parts = [item for rank in ranks for item in rank.apart.items()]
    for name, losses, norms, apart in (
        (f"transformers {version('transformers')}", plain.losses, plain.norms, weights),
        (f"megatron-core {version('megatron-core')}", megatron, ranks[0].norms, parts),
    ):
        assert len(losses) == len(norms) == len(ours.losses) == recipe.steps
        loss = np.abs(np.subtract(losses, ours.losses)).max()
        norm = np.abs(np.divide(norms, ours.norms) - 1).max()
        weight = max(float(x) for tensor, x in apart if wide or not tensor.endswith(OF_KEYS))
        kind = f"{family}, {'fp64' if wide else 'fp32'}"
        print(f"{name}, {kind}: {loss:.2g}, {norm:.2g} and {weight:.2g} apart")
        bound = 1e-11 if wide else 1e-5
        assert loss < bound
        assert norm < bound
        assert weight < bound
