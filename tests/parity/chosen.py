"""Experts that tokens choose in a test, whatever their router says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.layers import routing

EVENLY = ((0, 1), (2, 3))
"""Two of four experts each, all as often."""


@contextmanager
def chosen(pattern: Sequence[Sequence[int]]) -> Iterator[None]:
    """Tokens choose these, in turn."""

    def choose(p: Tensor, *_: Any) -> Tensor:
        return torch.tensor(pattern, dtype=torch.int16)[torch.arange(len(p)) % len(pattern)]

    with mock.patch.object(routing, "choose", choose):
        yield
