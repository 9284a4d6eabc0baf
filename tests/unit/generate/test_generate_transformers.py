"""Greedy texts, token for token those of transformers' `generate` on every class of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megapipe.convert import HuggingFaceFolder, export
from megapipe.generate import Generator, Sampling
from megapipe.inference import load_model
from megapipe.model.gpt.hf.table import TABLE
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

CASES = {
    "gpt2": "gpt2",
    "llama": "llama_gqa",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_neox": "pythia",
    "bloom": "bloom",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "dots1": "dots1",
}
"""A model for each class."""
PROMPTS = ["ab", "a longer text", "x", "ab cd"]
TOKENS = 12


def test_every_class_has_a_model() -> None:
    assert CASES.keys() == TABLE.keys()


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in ("gpt2", "llama") else pytest.mark.full)
        for name in CASES
    ],
)
def test_greedy_texts_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Models come from the folder that transformers reads; prompts have unequal lengths."""
    changes = {"vocab_size": 257, "max_positions": 32, "dtype": "fp32"}
    model = model_of(CASES[model_type]).model_copy(update=changes)
    params = init_random(model, seed=11, dtype=torch.float32)
    export(write_checkpoint(tmp_path, model, params), tmp_path / "hf", model_type=model_type)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    generator = Generator(load_model(HuggingFaceFolder.open(tmp_path / "hf"), torch.device("cpu")))
    found: list[list[int]] = [[] for _ in PROMPTS]
    for piece in generator.generate(PROMPTS, Sampling(tokens=TOKENS, temperature=0)):
        found[piece.prompt].append(piece.token)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = hf.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0, ids.shape[1] :]
        assert tokens == expected.tolist()
    assert len({tuple(tokens) for tokens in found}) > 1
