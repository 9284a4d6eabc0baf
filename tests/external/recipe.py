"""One training run that several systems carry out: sizes, rows, first weights, optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_string
from inspect import getfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from megapipe.data.commands import main

VOCABULARY = 320
"""160 on a rank at tp 2; megapipe pads that to 256."""
MODELS = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=256,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=256,
    ),
}


@dataclass(frozen=True)
class Recipe:
    """AdamW with clipping, warm-up and cosine decay; weight decay for matrices alone. All
    micro-batches have equally many tokens."""

    family: str = "llama"
    steps: int = 50
    sequence: int = 64
    batch: int = 8
    """Samples of a step."""
    microbatch: int = 2
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 10
    """Steps before the one with the peak: step i, counted from 1, has lr x i / (warmup + 1)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 2.5
    seed: int = 1234
    split: str = "90,10,0"
    dp: int = 2
    tp: int = 2
    pp: int = 2
    wide: bool = False
    """Whether everything is computed in fp64, not in fp32."""

    @property
    def model(self) -> PretrainedConfig:
        return MODELS[self.family]

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp


class Outcome(NamedTuple):
    """A run of one system."""

    losses: list[float]
    """Mean loss over the tokens of each step, nats."""
    norms: list[float]
    """Gradient norm of each step, before clipping."""
    weights: Mapping[str, Tensor]
    """Weights after the last step, by the names of transformers."""


def write_model(config: PretrainedConfig, folder: Path) -> Path:
    """Save a model that transformers has initialised."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_tokens(folder: Path) -> Path:
    """Write a token file, each standard library module as bytes being a document; return its
    prefix."""
    modules = Path(getfile(message_from_string)).parent.glob("*.py")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": m.read_text()}) + "\n" for m in sorted(modules)))
    prefix = folder / "tokens"
    given = ["--source", str(texts), "--tokenizer", "byte", "--output", str(prefix)]
    assert main([*given, "--tokenizer-workers", "1"]) == 0
    return prefix
