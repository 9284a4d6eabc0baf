"""50 steps from the same weights over the same token file: megapipe at dp 2 x tp 2 x pp 2 beside a
plain loop with transformers, and beside megatron-core in the same layout. What is set on each side
is in docs/comparison.md, and what comes out (``pytest -rP`` prints it)."""

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
    """The command of a user, and the folder that is exported from its checkpoint."""
    settings = {
        "run.folder": folder / "runs",
        "run.name": "ours",
        "run.seed": recipe.seed,
        "checkpoint.load": model,
        "checkpoint.load_only": "weights",
        "model.dtype": "fp64" if recipe.wide else "fp32",
        "data.source": tokens,
        "data.tokenizer": "byte",
        "data.samples": "megatron",
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
        "optimizer.beta1": recipe.beta1,
        "optimizer.beta2": recipe.beta2,
        "optimizer.eps": recipe.eps,
        "optimizer.weight_decay": recipe.weight_decay,
        "optimizer.clip": recipe.clip,
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


@pytest.mark.parametrize(
    ("wide", "loss", "norm", "weight"),
    [
        pytest.param(False, 1e-5, 1e-5, 1e-4, id="fp32", marks=pytest.mark.full),
        pytest.param(True, 1e-11, 1e-11, 1e-11, id="fp64", marks=pytest.mark.slow),
    ],
)
def test_the_same_curve(
    wide: bool,
    loss: float,
    norm: float,
    weight: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses are compared absolutely, norms relatively, weights absolutely."""
    recipe = Recipe(wide=wide)
    model, tokens = write_model(tmp_path / "model"), write_tokens(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(model), "--config"]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    samples = recipe.steps * recipe.batch
    rows = training_rows(tokens, recipe.seed, recipe.sequence, recipe.split, samples)

    ours = megapipe_run(recipe, tmp_path, model, tokens)
    plain = plain_loop.train(recipe, model, rows)
    (tmp_path / "other").mkdir()
    save_file(dict(ours.weights), tmp_path / "other/model.safetensors")
    # forks of this process, which has megatron-core loaded
    ranks = spawn(megatron_loop.train, recipe.world, recipe, model, rows, tmp_path / "other")
    curves = [rank.losses for rank in ranks if rank.losses]  # of the last stage's ranks
    megatron = [mean(losses) for losses in zip(*curves, strict=True)]

    assert ours.weights.keys() == plain.weights.keys()
    apart = {
        f"transformers {version('transformers')}": (
            plain.losses,
            plain.norms,
            max((plain.weights[n] - w).abs().max().item() for n, w in ours.weights.items()),
        ),
        f"megatron-core {version('megatron-core')}": (
            megatron,
            ranks[0].norms,
            max(max(rank.apart.values()) for rank in ranks),
        ),
    }
    assert all(rank.norms == ranks[0].norms for rank in ranks)
    assert min(ours.norms) < recipe.clip < max(ours.norms)
    assert ours.losses[-1] < ours.losses[0] - 1
    for name, (losses, norms, weights) in apart.items():
        assert len(losses) == len(norms) == len(ours.losses) == recipe.steps
        losses_apart = np.abs(np.subtract(losses, ours.losses))
        norms_apart = np.abs(np.divide(norms, ours.norms) - 1)
        print(
            f"{name}, {'fp64' if wide else 'fp32'}: losses {losses_apart.max():.2g} apart (step "
            f"{losses_apart.argmax() + 1}), norms {norms_apart.max():.2g} of themselves, weights "
            f"{weights:.2g}"
        )
        assert losses_apart.max() < loss
        assert norms_apart.max() < norm
        assert weights < weight
