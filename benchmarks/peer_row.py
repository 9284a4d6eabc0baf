"""Parts that the sides of :mod:`peers` share: the model and layout of a row, its batches, weights
and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from plain_gpt import PlainGPT
from step import BETAS, CLIP, LR, Size, decayed, initial_weights
from torch import Tensor, nn
from torch.nn import functional
from zero import own_batches

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS

GOAL = 1.1

Side = Callable[[int], float]
"""Function that runs step i on this rank; returns its loss, or NaN if the rank does not know it."""


@dataclass(frozen=True)
class Row:
    """One model, one layout, one peer."""

    name: str
    peer: str
    size: Size
    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    goal: float = GOAL
    pipeline: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def chunks(self) -> int:
        """Number of stages of each pipeline rank."""
        return int(self.pipeline.get("chunks", 1))

    @property
    def samples(self) -> int:
        """Samples in a step."""
        return self.dp * self.microbatches * self.size.batch

    def config(self) -> tuple[Config, Layout]:
        settings = self.size.config()[0].model_dump()
        settings["model"]["tied_embeddings"] = self.pp == 1  # torch's pipelining ties nothing
        settings["parallel"] |= {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        settings["pipeline"] |= self.pipeline
        settings["train"]["global_batch"] = self.samples
        config = Config.model_validate(settings)
        return resolve(config, self.world, self.size.vocab, measure=BY_UNITS)

    def batches(self) -> Tensor:
        """Return [n, samples, s + 1], the batches of the replicas one after the other."""
        parts = [own_batches(self.size, part) for part in range(self.samples // self.size.batch)]
        return torch.cat(parts, dim=1)


def plain_model(row: Row, *, tied: bool) -> PlainGPT:
    """Make the plain GPT-2 with megapipe's first weights."""
    model = PlainGPT(row.config()[0].model)
    state = initial_weights(row.size, tied=tied)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.wte.weight))
    model.load_gpt2(state)
    return model


class Part(nn.Module):
    """Some layers of the plain GPT-2, with the ends of the model where they belong."""

    def __init__(self, model: PlainGPT, layers: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.h = nn.ModuleList(model.h[i] for i in layers)
        self.first, self.last = first, last
        if first:
            self.wte, self.wpe = model.wte, model.wpe
        if last:
            self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [b, s] or hidden states [b, s, h] to hidden states or logits [b, s, V]."""
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        if self.last:
            x = self.lm_head(self.ln_f(x))
        return x


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss per token in nats, of [b, s, V] and [b, s]."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decayed(parameters), lr=LR, betas=BETAS, fused=True)


def clip(whole: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Clip gradients by their global norm: `whole` ones that every rank has, `parts` that differ
    from rank to rank."""
    square = torch.zeros(())
    if parts:
        square = torch.stack(torch._foreach_norm(list(parts))).square().sum()
    dist.all_reduce(square)
    if whole:
        square += torch.stack(torch._foreach_norm(list(whole))).square().sum()
    factor = CLIP / (float(square.sqrt()) + 1e-6)
    if factor < 1:
        torch._foreach_mul_([*whole, *parts], factor)
