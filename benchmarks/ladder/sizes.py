"""The rungs: models from 124M to 7B parameters, and the configurations in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.flops import head_flops, layer_flops
from megapipe.model.gpt.model_spec import GPTSpec
from megapipe.model.interface import RunShape

Settings = Mapping[str, Mapping[str, Any]]
"""Configuration keys that differ from the base, by section."""

GPT_2 = {"vocab_size": 50257}
UNBALANCED = {"aux_loss_coeff": 0.0}
LLAMA = {
    "vocab_size": 32000,
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
    "tied_embeddings": False,
}


@dataclass(frozen=True)
class Size:
    """A model, its sequence length, and how much of it a step takes."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    family: Mapping[str, Any]
    start: int
    """Rows of the first micro-batch that the search tries."""
    most: int
    """Rows above which the search does not go."""
    microbatches: int
    """Micro-batches per step: enough that the update is a small part of it."""
    goal: float | None = None
    """Model FLOPs utilisation to reach, in percent of the dense peak."""
    floor: float | None = None
    weight: float = 1.0
    """Share of the time, relative to other sizes."""

    def settings(self, rows: int, microbatches: int, device: torch.device) -> dict[str, Any]:
        """Return the base configuration, as sections; bf16 on a GPU."""
        return {
            "model": {
                "layers": self.layers,
                "hidden": self.hidden,
                "heads": self.heads,
                "dtype": "bf16" if device.type == "cuda" else "fp32",
                **self.family,
            },
            "parallel": {"device": device.type},
            "optimizer": {"lr": 1e-4, "warmup_steps": 0, "schedule": "constant"},
            "train": {
                "sequence_length": self.sequence,
                "microbatch": rows,
                "global_batch": rows * microbatches,
            },
        }

    def config(
        self,
        rows: int,
        device: torch.device,
        changes: Settings | None = None,
        *,
        microbatches: int | None = None,
    ) -> tuple[Config, Layout]:
        """Return the resolved configuration of one process, with `changes` on top."""
        sections = self.settings(rows, microbatches or self.microbatches, device)
        for section, keys in (changes or {}).items():
            sections[section] = {**sections.get(section, {}), **keys}
        return resolve(Config.model_validate(sections), 1, self.family["vocab_size"])

    @cached_property
    def model(self) -> ModelConfig:
        return self.config(1, torch.device("cpu"))[0].model

    @property
    def matmul_parameters(self) -> int:
        """N of 6N: parameters in matrix products of a token, the head included, embeddings not."""
        experts = self.model.moe.experts_of
        layers = (layer_flops(self.model, 0, experts=experts(i)) for i in range(self.layers))
        return (sum(layers) + head_flops(self.model)) // 2

    @property
    def flops(self) -> int:
        """Model FLOPs of training on one token: 6N + 12 L H Q T."""
        return int(GPTSpec(self.model, RunShape(self.sequence, microbatch=1)).token_flops())

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw random tokens and labels, each [rows, s], in host memory."""
        generator = torch.Generator().manual_seed(rows)
        shape = (rows, self.sequence + 1)
        tokens = torch.randint(self.family["vocab_size"], shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


LADDER = [
    Size("124M", 12, 768, 12, 1024, GPT_2, 256, 1024, 1, goal=40, floor=35, weight=0.8),
    Size("350M", 24, 1024, 16, 1024, GPT_2, 96, 512, 1, goal=45, floor=40, weight=0.9),
    Size("1.3B", 24, 2048, 16, 2048, GPT_2, 24, 128, 1, goal=50, floor=45, weight=1.1),
    Size(
        "7B", 32, 4096, 32, 4096, {**LLAMA, "ffn_hidden": 11008}, 1, 16, 4, goal=53, floor=48,
        weight=2.2,
    ),
]  # fmt: skip
"""GPT-2 small and medium, GPT-3 XL and Llama 2 7B."""

MIXTURE = Size(
    "3B of experts", 16, 1536, 12, 2048,
    {**LLAMA, "moe": {"num_experts": 32, "top_k": 4, "expert_ffn_hidden": 1152, **UNBALANCED}},
    8, 16, 8,
)  # fmt: skip
"""4 of 32 experts: 0.59B of 3.0B parameters are active."""
DENSE = Size("0.6B dense", 16, 1536, 12, 2048, {**LLAMA, "ffn_hidden": 4 * 1152}, 8, 16, 8)
"""Dense model with as many parameters as are active in `MIXTURE`."""

TOY = Size("toy", 2, 32, 2, 16, {"vocab_size": 64}, 2, 4, 2)
TOY_MIXTURE = Size(
    "toy of experts", 2, 32, 2, 16,
    {
        **LLAMA,
        "vocab_size": 64,
        "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden": 32, **UNBALANCED},
    },
    2, 4, 2,
)  # fmt: skip
TOY_DENSE = Size("toy dense", 2, 32, 2, 16, {**LLAMA, "vocab_size": 64, "ffn_hidden": 64}, 2, 4, 2)


def size_of(name: str) -> Size:
    every = [*LADDER, MIXTURE, DENSE, TOY, TOY_MIXTURE, TOY_DENSE]
    return next(size for size in every if size.name == name)


def has_key(section: str, key: str) -> bool:
    """Whether configurations have `section`.`key`."""
    fields = Config.model_fields
    return section in fields and key in fields[section].default.__class__.model_fields


def known_changes(changes: Sequence[Settings]) -> list[Settings]:
    """Return the changes whose keys all exist."""
    return [
        change
        for change in changes
        if all(has_key(section, key) for section, keys in change.items() for key in keys)
    ]


def words(changes: Settings) -> str:
    """Write `changes` as on a command line."""
    return " ".join(_assignments(changes)) or "defaults"


def _assignments(changes: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in changes.items():
        if isinstance(value, dict):
            yield from _assignments(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value}"
