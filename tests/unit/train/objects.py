"""A model, samples and settings as Python objects, for runs of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def layers(vocab_size: int, width: int = 8) -> list[nn.Module]:
    return [nn.Embedding(vocab_size, width), nn.Tanh(), nn.Linear(width, vocab_size)]


class Counting:
    """Samples that count up from their number."""

    def __init__(self, split: str, sequence_length: int) -> None:
        self.length = sequence_length + 1

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> list[int]:
        return [(i + j) % 50 for j in range(self.length)]


def settings(folder: Path) -> dict[str, Any]:
    return {
        "run": {"folder": str(folder)},
        "parallel.pp": 2,
        "pipeline": {"transport": "in_process"},
        "optimizer": {
            "lr": 0.1,
            "warmup_steps": None,
            "schedule": "constant",
            "max_grad_norm": None,
        },
        "train": {"steps": 4, "sequence_length": 8, "global_batch": 4, "microbatch": 1},
    }
