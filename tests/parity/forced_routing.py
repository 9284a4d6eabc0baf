"""Forced routing: tests set which experts tokens choose, whatever the router says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.layers.moe import routing
from megapipe.layers.moe.specs import Routing


@contextmanager
def chosen(pattern: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let tokens choose these experts, in turn."""

    def choose(p: Tensor, *_: Any) -> Tensor:
        return torch.tensor(pattern, dtype=torch.int16)[torch.arange(len(p)) % len(pattern)]

    with mock.patch.object(routing, "route_tokens", choose):
        yield


@contextmanager
def evenly() -> Iterator[None]:
    """Let the positions of a sequence choose one expert after the other; dropping stays as it
    is."""
    choose = routing.route_tokens

    def in_turn(p: Tensor, given: Routing, sequences: int, *rest: Any) -> Tensor:
        first = torch.arange(len(p)).div(sequences, rounding_mode="floor") * given.top_k
        ranked = (torch.arange(given.experts) - first.unsqueeze(1)) % given.experts
        return choose((1 + given.experts - ranked).to(p.dtype), given, sequences, *rest)

    with mock.patch.object(routing, "route_tokens", in_turn):
        yield
