"""Runs with experts that begin with the weights of a dense model: its loss, at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint import Checkpoint, Region
from megapipe.cli import parse
from megapipe.config.model import ModelConfig
from megapipe.convert import export
from megapipe.errors import CheckpointError
from megapipe.layout.resolve import resolve
from megapipe.testing import run_world
from megapipe.train.moe.upcycle import Upcycled, without_source
from tests.parity.converted import write_checkpoint
from tests.parity.first_step import first_losses
from tests.parity.jobs import arguments, tiny
from tests.parity.reference import init_random, shapes
from tests.parity.stopped_runs import BASE
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import model_of

EXPERTS = "model.moe.num_experts=4"
PYRAMID = "model.moe.num_experts=[2,6,4,4]"
TP = "parallel.tp=2 parallel.sequence_parallel=true"


def dense(folder: Path, case: str) -> tuple[ModelConfig, Checkpoint, list[str]]:
    """Write a checkpoint with random weights; also return arguments of a run of the model."""
    changes = {"vocab_size": 257, "layers": 4, "max_positions": 64}
    model = model_of(case).model_copy(update=changes)
    checkpoint = write_checkpoint(folder / "dense", model, init_random(model, seed=5))
    keys = {f"model.{key}": v for key, v in model.model_dump(exclude={"moe", "rope"}).items()}
    keys |= {f"model.rope.{key}": value for key, value in model.rope.model_dump().items()}
    given = {key: str(value) for key, value in keys.items() if value not in (None, {})}
    base = {key: v for key, v in {**tiny(folder), **BASE}.items() if not key.startswith("model.")}
    return model, checkpoint, arguments({**base, **given, "checkpoint.load": str(folder / "dense")})


def of_run(weights: Checkpoint, argv: list[str], *more: str) -> tuple[Upcycled, ModelConfig]:
    config, _ = resolve(parse([*argv, *more, "checkpoint.upcycle=true"]).config, 1, 257)
    return Upcycled.of(weights, config), config.model


@pytest.mark.parametrize(
    ("case", "experts"), [("gpt2", EXPERTS), ("llama_gqa", "model.moe.num_experts=[2,6,4]")]
)
def test_each_expert_is_a_copy_of_the_mlp(case: str, experts: str, tmp_path: Path) -> None:
    _, checkpoint, argv = dense(tmp_path, case)
    given = (experts, "model.moe.first_dense_layers=1", "model.moe.bias_update_rate=0.1")
    upcycled, model = of_run(checkpoint, argv, *given)
    wanted = {f"model/{name}": shape for name, shape in shapes(model).items()}
    fresh = without_source(wanted)
    router = {f"model/layers.{i}.moe.router" for i in (1, 2, 3)}
    assert fresh == {f"{name}.{kind}" for name in router for kind in ("weight", "bias")}
    upcycled.match(wanted)
    bias = torch.ones(4)
    upcycled.read_into(bias, "model/layers.3.moe.router.bias", Region((0,), (4,)))
    assert not bias.any()
    down = "model/layers.3.moe.down.weight"
    with pytest.raises(CheckpointError, match=r"layers.3.mlp.down.weight"):
        upcycled.match({name: shape for name, shape in wanted.items() if name != down})
    for name in wanted.keys() - fresh:
        source = name.replace(".moe.", ".mlp.")
        expected = checkpoint.read(source)
        shape = wanted[name]
        if source != name:
            expected = expected.expand(shape)
        half = Region((0,) * len(shape), (*(-(-n // 2) for n in shape[:-1]), shape[-1]))
        for region in (
            half,
            Region(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape)),
        ):
            out = torch.empty(region.sizes, dtype=torch.float64)
            upcycled.read_into(out, name, region)
            assert torch.equal(out, expected[region.inside(Region((0,) * len(shape), shape))])


def test_what_experts_cannot_be_copies_of_is_refused(tmp_path: Path) -> None:
    model, checkpoint, argv = dense(tmp_path, "llama")
    with pytest.raises(
        CheckpointError, match=r"model.ffn_hidden=40, but model.moe.expert_ffn_hidden=20: .* 40$"
    ):
        of_run(checkpoint, argv, EXPERTS, "model.moe.expert_ffn_hidden=20")
    moe = of_run(checkpoint, argv, EXPERTS)[1].moe
    mixture = model.model_copy(update={"moe": moe})
    checkpoint = write_checkpoint(tmp_path / "mixture", mixture, init_random(mixture, seed=5))
    with pytest.raises(
        CheckpointError, match=r"already has model.moe.num_experts=4: expected a dense"
    ):
        of_run(checkpoint, argv, EXPERTS)


@in_parts("case", ["gpt2", "llama_gqa"], full=["llama_gqa"])
def test_a_run_begins_with_the_loss_of_the_dense_model(case: str, tmp_path: Path) -> None:
    """The dense model is its own checkpoint or, rounded to fp32, a Hugging Face folder. Weights
    that do not sum to 1 give another loss."""
    _, checkpoint, argv = dense(tmp_path, case)
    export(checkpoint, tmp_path / "hf", dtype="fp64")
    folder = f"checkpoint.load={tmp_path / 'hf'}"
    given: list[Any] = [
        "parallel.dp=4",
        "parallel.dp=4 parallel.ep=4",
        f"parallel.dp=2 {TP} parallel.ep=2 parallel.etp=2 optimizer.zero=1",
        f"parallel.pp=2 {TP} parallel.ep=2 model.moe.top_k=3 model.moe.bias_update_rate=0.1",
        f"parallel.dp=4 parallel.ep=2 optimizer.zero=3 pipeline.schedule=gpipe {folder}",
        f"{TP} parallel.cp=2 parallel.ep=4 model.moe.score_function=sigmoid",
        f"parallel.dp=2 parallel.pp=2 parallel.ep=2 {PYRAMID}",
        "parallel.dp=4 parallel.ep=2 model.moe.norm_topk_prob=false",
    ]
    mixture = f"{EXPERTS} checkpoint.upcycle=true "
    runs = [
        [*argv, *((mixture if i else "checkpoint.load_only=weights ") + layout).split()]
        for i, layout in enumerate(given)
    ]
    first, *others, other = run_world(4, first_losses, runs, timeout_s=200)[0]
    assert others == pytest.approx([first] * len(others), rel=1e-12)
    assert abs(other - first) > 1e-3
