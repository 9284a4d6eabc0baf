"""Faults of an auxiliary loss with bandwidths, seeded one at a time: parity notices each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.assembly import sharding
from megapipe.layers.moe import experts, routing
from tests.parity.cases import Case
from tests.parity.faults import Patch

SKEWED = Case(dp=2, ep=2, moe="top 2", masked=0.3, layers=2, topology=(4.0, 1.0))


def distances_of_the_first_rank() -> Patch:
    of = sharding.bandwidths
    return mock.patch.object(sharding, "bandwidths", lambda config, index: of(config, 0))


def _distances(made: Callable[[Tensor, int], Tensor]) -> Patch:
    def wrong(bandwidths: Sequence[float], count: int, dtype: torch.dtype) -> Tensor:
        return made(torch.tensor(bandwidths, dtype=torch.float64), count).to(dtype)

    return mock.patch.object(routing, "distance_factors", wrong)


def more_is_sent_over_slow_links() -> Patch:
    return _distances(lambda b, n: (b / b.mean()).repeat_interleave(n // len(b)))


def distances_not_divided_by_their_mean() -> Patch:
    return _distances(lambda b, n: (1 / b).repeat_interleave(n // len(b)))


def experts_taken_to_be_dealt_to_ranks_in_turn() -> Patch:
    return _distances(lambda b, n: (1 / b / (1 / b).mean()).repeat(n // len(b)))


def distances_in_the_gradient_alone() -> Patch:
    load = routing.routing_stats
    return mock.patch.object(routing, "routing_stats", lambda *given: load(*given[:4]))


def distances_in_what_is_told_alone() -> Patch:
    backward = experts._ExpertsFunction.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        with mock.patch.object(ctx.layer, "distance", None):
            return backward(ctx, grad)

    return mock.patch.object(experts._ExpertsFunction, "backward", wrong)


FAULTS: dict[Callable[[], Patch], Case] = {
    distances_of_the_first_rank: SKEWED,
    more_is_sent_over_slow_links: SKEWED,
    distances_not_divided_by_their_mean: SKEWED,
    experts_taken_to_be_dealt_to_ranks_in_turn: replace(SKEWED, moe="groups"),
    distances_in_the_gradient_alone: SKEWED,
    distances_in_what_is_told_alone: SKEWED,
}
