"""Attention within documents, in every kind of layout, against the plain model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Grid
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from megapipe.train.trainer import Trainer
from tests.parity.ranks import Case, check_case, expected, plain, run_cases

CASE = Case(documents=True, model="llama", sequence=12)
HALVES = replace(CASE, pp=2, m=2, schedule="chimera_backward_halving", masked=0.4)
CASES = {
    1: [CASE, replace(CASE, slices=3, schedule="seq1f1b"), replace(CASE, model="gpt2")],
    2: [HALVES, replace(HALVES, model="gpt2", batch=4, in_process=True, dp=2)],
    4: [
        replace(CASE, pp=4, m=4, model="gpt2"),  # the inner stages see no tokens
        replace(CASE, pp=2, tp=2, m=4, sequence_parallel=True, kv_heads=2),
        replace(CASE, pp=2, dp=2, m=3, slices=2, schedule="seq1f1b"),
        replace(CASE, pp=2, tp=2, m=4, schedule="zb_v", masked=0.4),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_equals_the_plain_model(world: int) -> None:
    results = run_world(world, run_cases, CASES[world])
    for i, case in enumerate(CASES[world]):
        check_case(case, [outcomes[i] for outcomes in results])


def test_documents_make_a_difference() -> None:
    steps, validation = expected(plain(CASE))
    others, other_validation = expected(plain(replace(CASE, documents=False)))
    assert abs(steps[0].loss - others[0].loss) > 1e-4
    assert abs(validation - other_validation) > 1e-4


def losses_of_runs(world: World, arguments: list[str]) -> list[float]:
    """Return the loss of a run's first step by the real trainer, with the key and without."""
    losses = []
    for name, value in (("within", "true"), ("across", "false")):
        own = [f"run.name={name}", f"data.document_mask={value}"]
        config, layout = resolve(parse([*arguments, *own]).config, 1, None)
        tokenizer = load_tokenizer("byte")
        with StopRequest() as stop:
            mesh = world.mesh(Grid())
            trainer = Trainer(config, layout, mesh, tokenizer, local_rank=0, stop=stop)
            trainer.run()
            trainer.close()
        summary = json.loads((trainer.folder.path / "summary.json").read_text())
        losses.append(summary["loss_first"])
    return losses


@pytest.mark.full
def test_a_run_finds_the_documents_of_its_corpus(tmp_path: Path) -> None:
    """Documents end at the tokenizer's end mark; the mask changes the loss of the first step
    already."""
    texts = [json.dumps({"text": f"{n} times {n} is {n * n}"}) for n in range(300)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(texts))
    sizes = {"model.layers": 1, "model.hidden": 32, "train.sequence_length": 64}
    steps = {"train.steps": 1, "optimizer.warmup_steps": 0, "optimizer.schedule": "constant"}
    places = {
        "data.source": tmp_path / "corpus.jsonl",
        "data.cache": tmp_path / "cache",
        "run.folder": tmp_path / "runs",
    }
    arguments = [f"{key}={value}" for key, value in {**sizes, **steps, **places}.items()]
    ((within, across),) = run_world(1, losses_of_runs, arguments)
    assert within == pytest.approx(across, rel=0.05)
    assert abs(within - across) > 1e-5
