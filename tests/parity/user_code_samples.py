"""User code, named in configurations as ``tests.parity.user_code_samples:name``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megapipe.config.update_rules import AdamOptions, LionOptions
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.optim.rules import Declaration, Elementwise, Rule, StateSlice
from megapipe.optim.rules.layerwise import LAMB as BuiltInLAMB

TOKENS = "MEGAPIPE_TEST_TOKENS"
"""Variable with the folder of a tokenized corpus."""


class Lion(Elementwise):
    """Like the built-in Lion, written differently."""

    declaration = Declaration(states=("momentum",), elementwise=True, options=LionOptions)
    options: LionOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        (momentum,), (beta1, beta2) = part.states, self.options.betas
        direction = torch.sign(momentum.lerp(part.grad, 1.0 - beta1))
        part.master.mul_(1.0 - lr * part.weight_decay)
        part.master.add_(direction, alpha=-lr)
        momentum.lerp_(part.grad, 1.0 - beta2)


class AdamW(Elementwise):
    """Adam with moments in plain arithmetic; torch's kernel differs from it in the last bits."""

    declaration = Declaration(
        states=("exp_avg", "exp_avg_sq"), elementwise=True, options=AdamOptions
    )
    options: AdamOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        (first, second), (beta1, beta2) = part.states, self.options.betas
        first.lerp_(part.grad, 1.0 - beta1)
        second.mul_(beta2).addcmul_(part.grad, part.grad, value=1 - beta2)
        root = (second / (1.0 - beta2 ** (count + 1))).sqrt_().add_(self.options.eps)
        part.master.mul_(1.0 - lr * part.weight_decay)
        part.master.addcdiv_(first, root, value=-lr / (1.0 - beta1 ** (count + 1)))


class LAMB(BuiltInLAMB):
    """A rule that communicates, with inherited methods."""


class Three(Elementwise):
    """A rule with more states than any built-in one."""

    declaration = Declaration(states=("a", "b", "c"), elementwise=True)

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        for state in part.states:
            state.add_(part.grad)
        part.master.sub_(part.grad, alpha=lr)


class OnlyStep(Rule):
    """A rule without state that defines the whole step."""

    declaration = Declaration(states=(), elementwise=True)

    def step(self, shards: Any, lr: float, count: int) -> None:
        for shard in shards:
            for window in shard.store.windows(0, shard.stop - shard.start):
                window.master.sub_(shard.grad[window.start : window.stop], alpha=lr)


def cosine(step: int, steps: int, lr: float, min_lr: float, warmup_steps: int) -> float:
    """Return the built-in schedule's learning rate, but count steps from 0."""
    step -= 1
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = min(1.0, max(0.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
    return lr + (min_lr - lr) * 0.5 * (1.0 - math.cos(math.pi * done))


class Windows:
    """The samples of a tokenized corpus: windows for training, triples up to the last held-out
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
    """Return a data set that differs in every process."""
    return [[os.getpid() % 251] * (sequence_length + 1)] * 9


def backwards_ring(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which keys go around the ring the other way."""
    return [[(p, (p + t) % ranks) for p in range(ranks)] for t in range(ranks)]


def half_a_ring(ranks: int) -> list[list[tuple[int, int]]]:
    """Return the first of the needed rounds only."""
    return backwards_ring(ranks)[:1]


def no_plan(ranks: int) -> int:
    return ranks
