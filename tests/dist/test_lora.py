"""Adapters in layouts, from a base to an export."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe import TrainStep
from megapipe.checkpoint import Checkpoint
from megapipe.convert import export
from megapipe.convert.adapters import Adapters
from megapipe.distributed.mesh import Grid
from megapipe.errors import CheckpointError, ConfigError
from megapipe.generate.generator import Generator
from megapipe.inference import load_model
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.testing import World, run_world
from tests.parity.cases import Rows
from tests.parity.collective_recorder import recording
from tests.parity.pair_runs import check_cases
from tests.parity.ranks import Case, configure
from tests.parity.stopped_runs import (
    HALF,
    STEPS,
    TP,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
)

TENSOR = Case(tp=2, lora="all", model="llama", kv_heads=2)
SPLIT = replace(TENSOR, sequence_parallel=True)
PIPELINE = Case(pp=2, m=3, lora="all")
OVER_FOUR = [
    replace(SPLIT, dp=2, ep=4, moe="pyramid", lora="some", model="gemma", zero=3),
    replace(PIPELINE, dp=2, ep=2, moe="shared, gated", schedule="chimera", m=4, rule="muon"),
]


@pytest.mark.full
def test_layouts_train_the_same_adapters() -> None:
    """Loss, every gradient, norm, weights and states; what is frozen stays to the bit. In more
    layouts: the parity matrix."""
    check_cases(OVER_FOUR)


@pytest.mark.slow
def test_a_run_begins_with_a_base_and_goes_on_at_another_layout(tmp_path: Path) -> None:
    """Bitwise at its own layout; the base stays as it was; a merged export is the model."""
    base = str(tmp_path / "runs/base")
    weights = {"checkpoint.load_only": "weights", "model.dtype": "bf16"}
    lora = {**weights, "lora.rank": "2", "lora.alpha": "16", "checkpoint.load": base}
    outcomes = run(
        tmp_path,
        Play("base", {"train.stop_after": "1", "model.dtype": "bf16"}),
        Play("whole", {**TP, **lora}),
        Play("part", {**TP, **lora}, stop_after=HALF),
        Play("part", {**TP, **lora}),
        Play("other", {**lora, "train.stop_after": "1"}),
        Play("other", {**lora, **TP, "train.stop_after": "2"}),
        Play("no_base", {"lora.rank": "2"}),
        Play("all_of_it", {"lora.rank": "2", "checkpoint.load": base, "model.dtype": "bf16"}),
        Play("none", {**weights, "checkpoint.load": str(tmp_path / "runs/whole")}),
    )
    _, whole, _, resumed, begun, moved, no_base, all_of_it, none = outcomes
    assert_continues(resumed, whole)
    assert_same_files(checkpoint(tmp_path, "part", STEPS), checkpoint(tmp_path, "whole", STEPS))
    assert [rank["error"] for rank in (*begun, *moved)] == [None] * 8
    assert [rank["first_step"] for rank in moved] == [1] * 4
    found = begun[0]["steps"][1].loss, whole[0]["steps"][1].loss
    assert found[0] == pytest.approx(found[1], rel=1e-2), "the same adapters, in bf16"

    source, trained = (
        Checkpoint.open(checkpoint(tmp_path, name, step))
        for name, step in (("base", 1), ("whole", 8))
    )
    adapters = [name for name in trained.names() if ".lora_" in name]
    assert {name.split("/")[0] for name in trained.names() if name not in adapters} == {"model"}
    for name in source.names():
        if name.startswith("model/"):
            first = source.read(name).to(torch.bfloat16)
            assert torch.equal(trained.read(name), first), name
    assert all(trained.read(name).any() for name in adapters)
    for name, region, values in whole[0]["loaded"]:
        if "lora_b" in name:
            assert not np.any(values)
        elif "lora_a" not in name:
            assert np.array_equal(
                values, source.read(f"model/{name}", region).to(torch.bfloat16).double()
            )

    for ranks, kind, words in (
        (no_base, ConfigError, "lora.rank=2 trains adapters on frozen weights"),
        (all_of_it, CheckpointError, "has no adapters, and lora.rank=2"),
        (none, CheckpointError, "has adapters, lora.rank=2: expected the same lora section"),
    ):
        assert ranks[0]["error"][0] is kind, ranks[0]
        assert words in ranks[0]["error"][1]
    check_export(trained, tmp_path)


def check_export(trained: Checkpoint, folder: Path) -> None:
    """Check that the merged model's logits are those of the adapted one."""
    from transformers import AutoModelForCausalLM

    export(trained, folder / "merged", dtype="fp32")
    model = load_model(trained, torch.device("cpu"))
    assert Adapters.of(trained, model.source.model).lora is not None
    tokens = torch.arange(12).view(1, 12)
    own = Generator(model).read(tokens.tolist(), room=1).logits()[0, :257].float()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    with torch.no_grad():
        expected = merged(input_ids=tokens).logits[0, -1]
    assert (own - expected).abs().max() < 0.05 * expected.abs().max(), "in bf16"


EXCHANGING = [
    replace(TENSOR, lora="some"),
    replace(TENSOR, lora="heads together", activations="full", schedule="gpipe"),
    replace(SPLIT, lora="some", pp=2, in_process=True, schedule="zb_h1", activations="selective"),
    replace(SPLIT, lora="heads together", activations="stage"),
    replace(SPLIT, lora="some", moe="pyramid", activations="selective"),
    replace(SPLIT, lora="all", moe="top 2", activations="full"),
]


def exchanged(world: World) -> list[tuple[Counter[str], Counter[str]]]:
    """Return how many 8-byte values a step of each case exchanges over tp, by collective: as
    recorded, and as planned."""
    found = []
    for case in EXCHANGING:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(Grid(tp=case.tp)))
        with recording() as recorder:
            step.train(0, Rows(case))
        called, planned = Counter[str](), Counter[str]()
        for call in recorder.calls:
            called[call.name] += call.elements
        for exchange in step_traffic(Units(config, layout), 0):
            planned[exchange.collective] += exchange.bytes // 8
        found.append((called, planned))
    return found


@pytest.mark.full
def test_collectives_are_those_of_the_plan() -> None:
    for rank in run_world(2, exchanged):
        for case, (called, planned) in zip(EXCHANGING, rank, strict=True):
            assert called == planned, case.name
            assert called
