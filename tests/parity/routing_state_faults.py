"""Faults of router state, biases and counts of choices, seeded one at a time: parity has to notice
each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import routing
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.routing import RoutingResult
from megapipe.layers.moe.specs import Routing
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.train import make_followers as routing_door
from megapipe.train.moe import routing_state
from megapipe.train.moe.routing_state import RoutingState
from megapipe.train.moe.routing_stats import by_layer
from megapipe.train.step.local_stats import StepTotals
from megapipe.train.step_stats import StepStats
from tests.parity.cases import Case
from tests.parity.faults import Patch

BIASED = Case(moe="groups", masked=0.3, layers=2)
COUNTED = replace(BIASED, moe="step")
FIRST = replace(COUNTED, moe="step, first", dp=2)
PYRAMID = replace(BIASED, moe="pyramid, biased", layers=3)
"""A case whose layers differ in their number of experts."""


def biases_in_the_weights() -> Patch:
    choose = routing.route_tokens

    def wrong(p: Tensor, how: Routing, n: int, shards: TokenShards, bias: Tensor, *_: Any) -> Any:
        p += bias
        return choose(p, how, n, shards)

    return mock.patch.object(routing, "route_tokens", wrong)


def biases_that_do_not_choose() -> Patch:
    choose = routing.route_tokens
    return mock.patch.object(routing, "route_tokens", lambda *args: choose(*args[:4]))


def biases_moved_towards_more_choices() -> Patch:
    move = RoutingState.update

    def wrong(self: RoutingState, told: Sequence[float]) -> None:
        with mock.patch.object(self, "_rate", -cast(float, self._rate)):
            move(self, told)

    return mock.patch.object(RoutingState, "update", wrong)


def biases_moved_by_each_micro_batch() -> Patch:
    """Move biases once for each micro-batch, by its own choices."""

    @contextmanager
    def patches() -> Iterator[None]:
        summed, move = routing_door.summed_loads, RoutingState.update
        told: list[list[float]] = []

        def spy(layers: Any, loads: Sequence[Any], device: Any) -> list[Tensor]:
            told[:] = [torch.cat(summed(layers, [load], device)).tolist() for load in loads]
            return summed(layers, loads, device)

        def wrong(self: RoutingState, _: Sequence[float]) -> None:
            for each in told:
                move(self, each)

        with (
            mock.patch.object(routing_door, "summed_loads", spy),
            mock.patch.object(RoutingState, "update", wrong),
        ):
            yield

    return patches()


def biases_moved_in_validation() -> Patch:
    evaluate = TrainStep.evaluate

    def wrong(self: TrainStep, *args: Any) -> Any:
        found = evaluate(self, *args)
        numbers = sum(self.layout.model.routing_stat_counts().values())
        self.routing.update([float(number % 5) for number in range(numbers)])
        return found

    return mock.patch.object(TrainStep, "evaluate", wrong)


def biases_that_layers_are_not_given() -> Patch:
    return mock.patch.object(RoutingState, "_hand_out")


def biases_by_the_choices_of_one_replica() -> Patch:
    """Move biases on each rank by what it has routed itself."""

    @contextmanager
    def patches() -> Iterator[None]:
        own, move = StepTotals.own, RoutingState.update
        told: list[float] = []

        def spy(self: StepTotals, *args: Any) -> StepStats:
            totals = own(self, *args)
            told[:] = totals.routing
            return totals

        with (
            mock.patch.object(StepTotals, "own", spy),
            mock.patch.object(RoutingState, "update", lambda self, _: move(self, told)),
        ):
            yield

    return patches()


def biases_by_the_choices_of_one_tp_rank() -> Patch:
    return biases_by_the_choices_of_one_replica()


def biases_by_the_choices_of_one_cp_rank() -> Patch:
    return biases_by_the_choices_of_one_replica()


def counts_by_the_choices_of_one_replica() -> Patch:
    return biases_by_the_choices_of_one_replica()


def biases_by_the_experts_of_the_first_layer() -> Patch:
    """Use the first layer's number of experts for the mean of each layer."""

    def wrong(self: RoutingState, told: Sequence[float]) -> None:
        first = len(next(iter(self.biases.values())))
        for layer, _, numbers, _ in by_layer(self._experts, told):
            counts = torch.tensor(numbers, dtype=torch.int64)
            self.counts[layer] = counts
            signs = (counts.sum() - counts * first).sign()
            self.biases[layer] += cast(float, self._rate) * signs
        self._hand_out()

    return mock.patch.object(RoutingState, "update", wrong)


def balance_by_the_choices_of_the_step_itself() -> Patch:
    choice = RoutedExperts.route

    def wrong(
        self: RoutedExperts, logits: Tensor, p: Tensor, mb: MicroBatch, *rest: Any
    ) -> RoutingResult:
        found = choice(self, logits, p, mb, *rest)
        counts = torch.bincount(
            routing.decode_choices(found.experts).flatten(), minlength=p.shape[-1]
        )
        return found._replace(counts=counts.unsqueeze(0))

    return mock.patch.object(RoutedExperts, "route", wrong)


def balance_of_a_step_by_all_choices() -> Patch:
    """Count all choices in the auxiliary loss, instead of first ones."""
    return _choices_mistaken(balance=True)


def biases_by_first_choices() -> Patch:
    """Move biases by first choices, instead of all."""
    return _choices_mistaken(balance=False)


def _choices_mistaken(*, balance: bool) -> Patch:
    def wrong(*given: Any) -> Iterator[Any]:
        for layer, numbers, every, first in by_layer(*given):
            both = every if balance else first
            yield layer, numbers, both, both

    return mock.patch.object(routing_state, "by_layer", wrong)


def balance_as_if_choices_were_spread_evenly() -> Patch:
    share = routing.load_fractions
    return mock.patch.object(
        routing, "load_fractions", lambda n, dtype: share(n.clamp(1, 1), dtype)
    )


FAULTS: dict[Callable[[], Patch], Case] = {
    biases_in_the_weights: BIASED,
    biases_that_do_not_choose: BIASED,
    biases_moved_towards_more_choices: BIASED,
    biases_moved_by_each_micro_batch: BIASED,
    biases_moved_in_validation: BIASED,
    biases_that_layers_are_not_given: BIASED,
    biases_by_the_choices_of_one_replica: replace(BIASED, dp=2),
    biases_by_the_choices_of_one_tp_rank: replace(BIASED, tp=2, sequence_parallel=True),
    biases_by_the_choices_of_one_cp_rank: replace(BIASED, cp=2),
    counts_by_the_choices_of_one_replica: replace(COUNTED, dp=2),
    biases_by_the_experts_of_the_first_layer: PYRAMID,
    balance_by_the_choices_of_the_step_itself: COUNTED,
    balance_of_a_step_by_all_choices: FIRST,
    biases_by_first_choices: FIRST,
    balance_as_if_choices_were_spread_evenly: COUNTED,
}
