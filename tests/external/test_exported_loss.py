"""An export of a trained model, evaluated by transformers, has the loss that its run logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from megapipe.convert.commands import main
from tests.parity.jobs import arguments, run_launched, tiny, write_corpus

STEPS, LENGTH = 200, 32

pytestmark = pytest.mark.full


@pytest.mark.slow
def test_the_loss_of_an_export_is_the_one_in_the_log(tmp_path: Path) -> None:
    """The text is held out and evaluated to its last token; at tp 2 the 257 ids are padded."""
    held_out = write_corpus(tmp_path / "held_out.txt", words=900)
    settings = {
        **tiny(tmp_path),
        "run.name": "run",
        "model.hidden": "32",
        "model.norm": "rmsnorm",
        "model.positions": "rotary",
        "model.activation": "swiglu",
        "model.bias": "false",
        "parallel.tp": "2",
        "data.validation.text": str(held_out),
        "train.microbatch": "4",
        "train.steps": str(STEPS),
        "train.sequence_length": str(LENGTH),
        "train.validate_every": "0",
        "train.validation_samples": "null",
        "optimizer.lr": "3e-3",
    }
    outcome = run_launched(tmp_path, 2, *arguments(settings), limit_s=180)
    assert set(outcome.codes) == {0}, outcome.text
    lines = map(json.loads, (tmp_path / "runs/run/log.jsonl").read_text().splitlines())
    (logged,) = (line for line in lines if line["kind"] == "validation")
    assert logged["step"] == STEPS
    assert main(["megapipe-to-hf", str(tmp_path / "runs/run"), str(tmp_path / "out")]) == 0

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    text = held_out.read_text()
    ids = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([*ids, tokenizer.eos_token_id])
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        window = ids[start : start + LENGTH + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += F.cross_entropy(logits, window[1:], reduction="none").double().sum().item()
    loss = total / (len(ids) - 1)
    print(f"logged {logged['loss']}, transformers {loss}: {abs(loss - logged['loss']):.2g} apart")
    assert loss == pytest.approx(logged["loss"], abs=1e-6)
    assert loss < 2, "it has learnt what ids alone do not tell"
