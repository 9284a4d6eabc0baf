"""The text of benchmarks that train: the source of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES = 4_000_000


def text() -> Tensor:
    """Return the first bytes of the standard library's modules, in order of their names."""
    collected = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        collected += path.read_bytes()
    return torch.frombuffer(collected[:TEXT_BYTES], dtype=torch.uint8).long()


class Rows:
    """Samples of the text that begin at random places; numbers below 0 are for validation."""

    def __init__(self, data: Tensor, length: int, seed: int) -> None:
        cut = len(data) // 20
        self.held_out, self.training = data[:cut], data[cut:]
        self.length = length
        self.seed = seed

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return self._at(self.training, [self.seed * 10**6 + i for i in indices])

    def validation(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return self._at(self.held_out, indices)

    def _at(self, data: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        span = torch.arange(self.length + 1)
        samples = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            start = torch.randint(len(data) - self.length, (1,), generator=generator)
            samples.append(data[start + span])
        stacked = torch.stack(samples)  # [b, s + 1]
        tokens, labels = stacked[:, :-1], stacked[:, 1:]
        return tokens, labels, torch.ones_like(labels, dtype=torch.bool)
