"""Code such as a user's, named in configurations as ``tests.parity.own_code:name``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.optim.rules import Declaration, Elementwise, Rule, StateSlice
from megapipe.optim.rules.layerwise import LAMB as BuiltInLAMB

TOKENS = "MEGAPIPE_TEST_TOKENS"
"""Variable with the folder of a tokenized corpus."""


class Lion(Elementwise):
    """As the built-in one, in other words."""

    declaration = Declaration(states=("momentum",), elementwise=True)

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        (momentum,) = part.states
        direction = torch.sign(momentum.lerp(part.grad, 1.0 - self.config.beta1))
        part.master.mul_(1.0 - lr * part.weight_decay)
        part.master.add_(direction, alpha=-lr)
        momentum.lerp_(part.grad, 1.0 - self.config.beta2)


class AdamW(Elementwise):
    """Adam's moments by plain arithmetic, of which torch's kernel differs in the last bits."""

    declaration = Declaration(states=("exp_avg", "exp_avg_sq"), elementwise=True)

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        first, second = part.states
        first.lerp_(part.grad, 1.0 - self.config.beta1)
        second.mul_(self.config.beta2).addcmul_(part.grad, part.grad, value=1 - self.config.beta2)
        root = (second / (1.0 - self.config.beta2 ** (count + 1))).sqrt_().add_(self.config.eps)
        part.master.mul_(1.0 - lr * part.weight_decay)
        part.master.addcdiv_(first, root, value=-lr / (1.0 - self.config.beta1 ** (count + 1)))


class LAMB(BuiltInLAMB):
    """A rule that communicates, with what it inherits."""


class Three(Elementwise):
    """More states than any built-in rule has."""

    declaration = Declaration(states=("a", "b", "c"), elementwise=True)

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        for state in part.states:
            state.add_(part.grad)
        part.master.sub_(part.grad, alpha=lr)


class OnlyStep(Rule):
    """No state, and the whole step its own."""

    declaration = Declaration(states=(), elementwise=True)

    def step(self, shards: Any, lr: float, count: int) -> None:
        for shard in shards:
            for window in shard.store.windows(0, shard.stop - shard.start):
                window.master.sub_(shard.grad[window.start : window.stop], alpha=lr)


def cosine(step: int, steps: int, lr: float, min_lr: float, warmup_steps: int) -> float:
    """As the built-in schedule, which counts steps from 0."""
    step -= 1
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = min(1.0, max(0.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
    return lr + (min_lr - lr) * 0.5 * (1.0 - math.cos(math.pi * done))


class Windows:
    """The samples of a tokenized corpus: windows for training, triples to the last held-out
    token for validation."""

    def __init__(self, split: str, sequence_length: int, tokenizer: Tokenizer) -> None:
        self.tokens = TokenFile(Path(os.environ[TOKENS], split)).tokens[:]
        self.length, self.eod = sequence_length, tokenizer.eod
        self.whole = split == "train"

    def __len__(self) -> int:
        labels = len(self.tokens) - 1
        return labels // self.length if self.whole else -(-labels // self.length)

    def __getitem__(self, index: int) -> Any:
        window = self.tokens[index * self.length : (index + 1) * self.length + 1]
        if self.whole:
            return torch.from_numpy(window.astype(np.int32))
        there = len(window) - 1
        mask = np.arange(self.length) < there
        tokens = [*window[: self.length].tolist(), *[self.eod] * (self.length - len(window))]
        labels = [*window[1:].tolist(), *[-100] * (self.length - there)]
        return tokens, labels, mask


def unlike(split: str, sequence_length: int) -> list[list[int]]:
    """A data set that is another in every process."""
    return [[os.getpid() % 251] * (sequence_length + 1)] * 9


def backwards_ring(ranks: int) -> list[list[tuple[int, int]]]:
    """Keys go the other way around."""
    return [[(p, (p + t) % ranks) for p in range(ranks)] for t in range(ranks)]


def half_a_ring(ranks: int) -> list[list[tuple[int, int]]]:
    """Not all that is needed."""
    return backwards_ring(ranks)[:1]


def no_plan(ranks: int) -> int:
    return ranks
