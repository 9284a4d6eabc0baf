"""Faults of the random numbers of routing, seeded one at a time: parity has to notice each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import routing
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.routing_noise import TokenNoise
from megapipe.layers.moe.tasks import RouterTask
from megapipe.layers.moe.token_shards import TokenShards
from tests.parity.cases import Case
from tests.parity.faults import Patch

RANDOM = Case(moe="random", masked=0.3, layers=2)


def _of(change: Callable[[MicroBatch, int], tuple[MicroBatch, int]]) -> Patch:
    """Use the noise of another micro-batch and layer."""
    of = TokenNoise.__init__

    def wrong(self: TokenNoise, mb: MicroBatch, layer: int, *rest: Any) -> None:
        of(self, *change(mb, layer), *rest)

    return mock.patch.object(TokenNoise, "__init__", wrong)


def the_same_noise_in_every_micro_batch() -> Patch:
    return _of(lambda mb, layer: (replace(mb, sample=0), layer))


def the_same_noise_in_every_step() -> Patch:
    return _of(lambda mb, layer: (replace(mb, step=0), layer))


def the_same_noise_in_every_layer() -> Patch:
    return _of(lambda mb, layer: (mb, 0))


def other_noise_where_it_is_run_again() -> Patch:
    return _of(
        lambda mb, layer: (
            replace(mb, seed=mb.seed + (layer in mb.scratch.by_layer(routing.CHOICE))),
            layer,
        )
    )


def noise_by_positions_of_the_rank_s_own() -> Patch:
    return mock.patch.object(
        TokenShards, "own_positions", lambda self, here, device: torch.arange(here, device=device)
    )


def noise_in_validation() -> Patch:
    noise = RoutedExperts.noise

    def wrong(self: RoutedExperts, mb: MicroBatch, x: Tensor) -> TokenNoise | None:
        with mock.patch.object(self, "training", True):
            return noise(self, mb, x)

    return mock.patch.object(RoutedExperts, "noise", wrong)


def a_router_gradient_of_input_without_jitter() -> Patch:
    of = RouterTask.__init__

    def wrong(self: RouterTask, weight: Any, x: Tensor, grad: Tensor, _: Any) -> None:
        of(self, weight, x, grad, lambda values: values.to(grad.dtype))

    return mock.patch.object(RouterTask, "__init__", wrong)


def an_input_gradient_without_jitter() -> Patch:
    """Leave out the jitter of the router's input gradients."""
    seen = RoutedExperts.router_input

    def wrong(self: RoutedExperts, noise: TokenNoise | None, values: Tensor) -> Tensor:
        backward = sys._getframe(1).f_code.co_name == "backward"
        return seen(self, None if backward else noise, values)

    return mock.patch.object(RoutedExperts, "router_input", wrong)


def choices_left_out_that_take_places() -> Patch:
    has_place = routing._within_capacity

    def wrong(ids: Tensor, *rest: Any) -> Tensor:
        return has_place(routing.decode_choices(ids), *rest)

    return mock.patch.object(routing, "_within_capacity", wrong)


def second_choices_kept_by_half_their_share() -> Patch:
    choose = routing.route_tokens

    def wrong(*args: Any) -> Tensor:
        *given, second, earlier = args
        return choose(*given, None if second is None else 2 * second, earlier)

    return mock.patch.object(routing, "route_tokens", wrong)


FAULTS: dict[Callable[[], Patch], Case] = {
    the_same_noise_in_every_micro_batch: RANDOM,
    the_same_noise_in_every_step: RANDOM,
    the_same_noise_in_every_layer: RANDOM,
    other_noise_where_it_is_run_again: replace(RANDOM, activations="full"),
    noise_by_positions_of_the_rank_s_own: replace(RANDOM, tp=2, sequence_parallel=True),
    noise_in_validation: RANDOM,
    a_router_gradient_of_input_without_jitter: RANDOM,
    an_input_gradient_without_jitter: RANDOM,
    choices_left_out_that_take_places: RANDOM,
    second_choices_kept_by_half_their_share: RANDOM,
}
