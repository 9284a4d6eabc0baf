"""Faults of MoE layers, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import experts, routing
from megapipe.layers.moe.dispatch import Combine
from megapipe.layers.moe.dispatchers import all_to_all
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatch
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.permutation import Permutation
from megapipe.layers.moe.routing import RoutingResult
from megapipe.layers.moe.slice_state import SliceRoutingState
from megapipe.layers.moe.specs import Routing
from megapipe.layers.moe.tasks import ExpertsTask
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.layers.moe.weights import ExpertWeights
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad
from megapipe.layout import buckets
from megapipe.model.gpt.moe.moe_layer import MoELayer
from megapipe.ops.moe.grouped import each_expert
from megapipe.optim.buffers import Bucket
from megapipe.optim.rules import layerwise, muon
from megapipe.optim.shard import Shard
from megapipe.train import make_followers as routing_door
from megapipe.train.feed import Feed
from tests.parity.cases import Case
from tests.parity.faults import (
    Patch,
    replicated_parameters_counted_on_every_tp_rank,
)

EXPERTS = Case(moe="top 2", masked=0.3)
DROPPING = Case(moe="capacity, choice", model="llama")
DATA = replace(EXPERTS, dp=2)
TENSOR = replace(EXPERTS, tp=2, sequence_parallel=True)
CONTEXT = replace(EXPERTS, cp=2)
SEVERAL = replace(EXPERTS, dp=2, ep=2)
SLICED = Case(pp=2, m=3, schedule="seq1f1b", slices=2, in_process=True, moe="capacity, position")
INNER = replace(EXPERTS, dp=2, etp=2)
LOSING = Case(moe="sixteen", model="llama", m=1, layers=1, steps=4, batch=2, sequence=6)
"""A case with so few tokens that experts have none in some steps."""
PYRAMID = replace(EXPERTS, moe="pyramid, biased", layers=3)
"""A case whose layers differ in their number of experts; the first one has 4."""


def gradient_through_the_weights_dropped() -> Patch:
    def wrong(grad: Tensor, p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
        return torch.zeros_like(p)

    return mock.patch.object(routing, "score_grad", wrong)


def weights_renormalised_after_dropping() -> Patch:
    add_up = Permutation.unpermute

    def wrong(self: Permutation, *rest: Any) -> Tensor:
        total = add_up(self, *rest)
        here = (self.row_of_choice < self.num_rows).sum(1, keepdim=True).clamp(min=1)
        return total * (self.row_of_choice.shape[1] / here)

    return mock.patch.object(Permutation, "unpermute", wrong)


def dropped_choices_take_the_last_row() -> Patch:
    of = Permutation.of.__func__  # type: ignore[attr-defined]

    def wrong(choice: Tensor, *numbers: int) -> Permutation:
        rows: Permutation = of(Permutation, choice, *numbers)
        return rows._replace(row_of_choice=rows.row_of_choice.clamp(max=rows.num_rows - 1))

    return mock.patch.object(Permutation, "of", wrong)


def places_counted_over_all_sequences() -> Patch:
    choose = routing.route_tokens
    return mock.patch.object(
        routing, "route_tokens", lambda p, how, _, *given: choose(p, how, 1, *given)
    )


def second_choices_go_before_first_ones() -> Patch:
    has_place = routing._within_capacity

    def wrong(ids: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return has_place(ids.flip(2), weight.flip(2), *rest).flip(2)

    return mock.patch.object(routing, "_within_capacity", wrong)


def dropped_choices_counted_for_the_first_expert() -> Patch:
    def wrong(choice: Tensor) -> Tensor:
        return torch.where(choice < 0, 0, choice).long()

    return mock.patch.object(routing, "decode_choices", wrong)


def _in_units(factor: Callable[[Feed, int], float]) -> Patch:
    positions = Feed._positions
    return mock.patch.object(
        Feed,
        "_positions",
        lambda self, schedule: (
            positions(self, schedule) / factor(self, schedule.whole_microbatches)
        ),
    )


def balance_scaled_by_micro_batches() -> Patch:
    return _in_units(lambda _, microbatches: microbatches)


def balance_by_the_positions_of_one_replica() -> Patch:
    return _in_units(lambda feed, _: feed.layout.dp)


def balance_by_unmasked_positions() -> Patch:
    backward = experts._ExpertsFunction.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        ctx.unit = ctx.unit / 0.7
        return backward(ctx, grad)

    return mock.patch.object(experts._ExpertsFunction, "backward", wrong)


def balance_of_each_micro_batch_instead_of_each_sequence() -> Patch:
    of = experts.RoutedExperts.__init__

    def wrong(self: RoutedExperts, *args: Any) -> None:
        of(self, *args)
        self.routing = replace(self.routing, scope="microbatch")

    return mock.patch.object(RoutedExperts, "__init__", wrong)


def counted_again_where_it_is_run_again() -> Patch:
    choice = RoutedExperts.route

    def wrong(
        self: RoutedExperts, logits: Tensor, p: Tensor, mb: MicroBatch, *rest: Any
    ) -> RoutingResult:
        loads, choices = (mb.scratch.by_layer(key) for key in (routing.LOAD, routing.CHOICE))
        before = loads.pop(self.layer, None)
        known = choices.pop(self.layer, None)
        found = choice(self, logits, p, mb, *rest)
        if before is not None and self.training:
            loads[self.layer] = loads[self.layer] + before
        if known is not None:
            choices.pop(self.layer, None)
        return found

    return mock.patch.object(RoutedExperts, "route", wrong)


def another_choice_where_it_is_run_again() -> Patch:
    choice = RoutedExperts.route

    def wrong(
        self: RoutedExperts, logits: Tensor, p: Tensor, mb: MicroBatch, *rest: Any
    ) -> RoutingResult:
        again = self.layer in mb.scratch.by_layer(routing.CHOICE)
        found = choice(self, logits, p, mb, *rest)
        others = (found.experts + 1) % self.routing.experts
        return found._replace(experts=others) if again else found

    return mock.patch.object(RoutedExperts, "route", wrong)


def gradient_of_an_expert_overwritten() -> Patch:
    run = ExpertsTask.run

    def wrong(self: ExpertsTask) -> None:
        for expert, _ in each_expert(self._ends):
            main_grad(self.weight)[expert] = 0
        run(self)

    return mock.patch.object(ExpertsTask, "run", wrong)


def biases_of_experts_not_weighted() -> Patch:
    def wrong(
        self: RoutedExperts, of: ExpertWeights, ends: Sequence[int], inner: Tensor, weight: Tensor
    ) -> Tensor:
        return narrow(self, of, ends, inner, torch.ones_like(weight))

    narrow = RoutedExperts.down_projection
    return mock.patch.object(RoutedExperts, "down_projection", wrong)


def gradients_of_biases_not_weighted() -> Patch:
    run = ExpertsTask.run

    def wrong(self: ExpertsTask) -> None:
        self.weighted = None
        run(self)

    return mock.patch.object(ExpertsTask, "run", wrong)


def a_gate_that_is_not_trained() -> Patch:
    forward = MoELayer.forward

    def wrong(self: MoELayer, x: Tensor, mb: MicroBatch, skip_output: bool = False) -> Tensor:
        gate = self.gate
        assert gate is not None
        with mock.patch.object(gate, "forward", lambda x: type(gate).forward(gate, x).detach()):
            return forward(self, x, mb, skip_output)

    return mock.patch.object(MoELayer, "forward", wrong)


def loads_of_one_micro_batch_only() -> Patch:
    summed = routing_door.summed_loads
    return mock.patch.object(
        routing_door,
        "summed_loads",
        lambda layers, loads, device: summed(layers, loads[:1], device),
    )


def experts_reduced_over_the_dense_group() -> Patch:
    groups = buckets._groups

    def wrong(*given: Any, over_ep: bool) -> Any:
        return groups(*given, over_ep=False)

    return mock.patch.object(buckets, "_groups", wrong)


def gradients_of_experts_averaged() -> Patch:
    finish = Shard.finish_reduce

    def wrong(self: Shard) -> None:
        finish(self)
        if self.bucket.entries[0].spec.over_ep:
            self.grad /= self.bucket.shard.size

    return mock.patch.object(Shard, "finish_reduce", wrong)


def experts_of_other_tp_ranks_left_out_of_the_norm() -> Patch:
    square = Shard.own_square

    def wrong(self: Shard) -> Tensor:
        total = square(self)
        is_zeroed = self.bucket.entries[0].spec.over_ep and self.axis.index > 0
        return total * 0 if is_zeroed else total

    return mock.patch.object(Shard, "own_square", wrong)


def gradients_of_experts_scaled(factor: float) -> Patch:
    finish = Shard.finish_reduce

    def wrong(self: Shard) -> None:
        finish(self)
        if self.bucket.over_ep:
            self.grad *= factor

    return mock.patch.object(Shard, "finish_reduce", wrong)


def gradients_of_experts_multiplied_by_ep() -> Patch:
    return gradients_of_experts_scaled(2.0)


def gradients_of_experts_divided_by_ep() -> Patch:
    return gradients_of_experts_scaled(0.5)


def gradients_of_the_step_before() -> Patch:
    zero = Bucket.zero_grad

    def wrong(self: Bucket) -> None:
        if self.over_ep:
            return
        zero(self)

    return mock.patch.object(Bucket, "zero_grad", wrong)


def gradient_of_an_expert_without_rows_stays() -> Patch:
    """Zero an expert's gradient at its first rows of a step, not at the step's beginning."""
    zero, run = Bucket.zero_grad, ExpertsTask.run
    zeroed: set[tuple[int, int]] = set()

    def lazy(self: Bucket) -> None:
        if not self.over_ep:
            zero(self)
        zeroed.clear()

    def zeroes(self: ExpertsTask) -> None:
        for expert, _ in each_expert(self._ends):
            if (place := (id(self.weight), expert)) not in zeroed:
                zeroed.add(place)
                main_grad(self.weight)[expert] = 0
        run(self)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Bucket, "zero_grad", lazy))
    stack.enter_context(mock.patch.object(ExpertsTask, "run", zeroes))
    return stack


def rows_come_back_in_the_order_of_experts() -> Patch:
    return mock.patch.object(AllToAllDispatch, "to_source_order", lambda self, number, rows: rows)


def rows_are_computed_in_the_order_of_ranks() -> Patch:
    def wrong(self: Any, number: int) -> Tensor:
        return self._transfers.pop(number).wait()

    return mock.patch.object(all_to_all._Rows, "wait", wrong)


def gradient_of_the_weights_of_others_lost() -> Patch:
    send = Combine.send
    return mock.patch.object(
        Combine, "send", lambda self, x: send(self, x * 0 if x.dim() == 1 else x)
    )


def bias_added_by_all_who_share_an_expert() -> Patch:
    of = experts.RoutedExperts.__init__

    def wrong(self: RoutedExperts, *args: Any) -> None:
        of(self, *args)
        self.first = True

    return mock.patch.object(RoutedExperts, "__init__", wrong)


def results_of_one_part_of_an_expert_only() -> Patch:
    send = Combine.send

    def wrong(self: Combine, rows: Tensor) -> None:
        ep, etp = self._dispatch.plan.dispatcher.ep, self._dispatch.plan.dispatcher.etp
        send(self, rows if ep.index % etp == 0 else rows * 0)

    return mock.patch.object(Combine, "send", wrong)


def router_gradient_of_one_shard_only() -> Patch:
    of = experts.RoutedExperts.__init__

    def wrong(self: RoutedExperts, *args: Any) -> None:
        of(self, *args)
        here = spec_of(self.router)
        cast(Any, self.router).spec = replace(here, sequence_partial=False)

    return mock.patch.object(RoutedExperts, "__init__", wrong)


def balance_counts_not_summed_over_tp() -> Patch:
    return mock.patch.object(TokenShards, "all_reduce", lambda self, counts: counts)


def balance_counts_not_summed_over_cp() -> Patch:
    return balance_counts_not_summed_over_tp()


def places_counted_per_rank() -> Patch:
    choose = routing.route_tokens
    return mock.patch.object(
        routing,
        "route_tokens",
        lambda p, how, n, _, *given: choose(p, how, n, routing.WHOLE, *given),
    )


def places_of_another_rank() -> Patch:
    return mock.patch.object(
        TokenShards,
        "local_part",
        lambda self, whole: whole.chunk(self.axis.size)[self.axis.index - 1],
    )


def positions_in_the_order_of_ranks() -> Patch:
    return mock.patch.object(TokenShards, "of", lambda axis, *_, **__: TokenShards(axis))


def one_trust_ratio_for_all_experts() -> Patch:
    return mock.patch.object(layerwise, "_count", return_value=1)


def trust_ratios_of_one_part_of_an_expert() -> Patch:
    return mock.patch.object(layerwise, "all_gather", lambda tensor, axis: tensor)


def a_part_of_an_expert_made_orthogonal() -> Patch:
    def on_parts(regions: Any, specs: Any, tp: Any, function: Any) -> Any:
        return [function(*each) for each in zip(regions, specs, strict=True)]

    return mock.patch.object(muon, "apply_to_full_matrices", on_parts)


def places_by_the_experts_of_the_first_layer() -> Patch:
    places = Routing.expert_capacity
    return mock.patch.object(
        Routing, "expert_capacity", lambda self, length: places(replace(self, experts=4), length)
    )


def balance_by_the_experts_of_the_first_layer() -> Patch:
    shares = routing.load_fractions
    return mock.patch.object(
        routing, "load_fractions", lambda n, dtype: shares(n, dtype) * 4 / n.shape[-1]
    )


def slices_that_know_of_no_earlier_ones() -> Patch:
    return mock.patch.object(RoutedExperts, "_earlier", side_effect=lambda _: SliceRoutingState())


def balance_counts_without_later_slices() -> Patch:
    def copied(total: Tensor | None, new: Tensor) -> Tensor:
        return new if total is None else total + new

    return mock.patch.object(experts, "added", copied)


def places_of_earlier_slices_free_again() -> Patch:
    return mock.patch.object(routing, "added", return_value=None)


def noise_of_the_first_slice_in_all() -> Patch:
    own_positions = TokenShards.own_positions
    return mock.patch.object(
        TokenShards,
        "own_positions",
        lambda self, *given: own_positions(self, *given) - self.earlier_positions,
    )


FAULTS: dict[Callable[[], Patch], Case] = {
    gradient_through_the_weights_dropped: EXPERTS,
    weights_renormalised_after_dropping: DROPPING,
    dropped_choices_take_the_last_row: DROPPING,
    places_counted_over_all_sequences: DROPPING,
    second_choices_go_before_first_ones: DROPPING,
    dropped_choices_counted_for_the_first_expert: DROPPING,
    balance_scaled_by_micro_batches: EXPERTS,
    balance_by_the_positions_of_one_replica: DATA,
    balance_by_unmasked_positions: EXPERTS,
    balance_of_each_micro_batch_instead_of_each_sequence: EXPERTS,
    counted_again_where_it_is_run_again: replace(EXPERTS, activations="full"),
    another_choice_where_it_is_run_again: replace(EXPERTS, activations="stage"),
    gradient_of_an_expert_overwritten: EXPERTS,
    biases_of_experts_not_weighted: EXPERTS,
    gradients_of_biases_not_weighted: EXPERTS,
    a_gate_that_is_not_trained: replace(EXPERTS, moe="shared, gated"),
    loads_of_one_micro_batch_only: EXPERTS,
    experts_reduced_over_the_dense_group: TENSOR,
    gradients_of_experts_multiplied_by_ep: SEVERAL,
    gradients_of_experts_divided_by_ep: SEVERAL,
    gradients_of_the_step_before: SEVERAL,
    gradient_of_an_expert_without_rows_stays: LOSING,
    rows_come_back_in_the_order_of_experts: SEVERAL,
    rows_are_computed_in_the_order_of_ranks: SEVERAL,
    gradient_of_the_weights_of_others_lost: SEVERAL,
    bias_added_by_all_who_share_an_expert: INNER,
    results_of_one_part_of_an_expert_only: INNER,
    replicated_parameters_counted_on_every_tp_rank: INNER,  # and biases of experts on those of etp
    gradients_of_experts_averaged: TENSOR,
    experts_of_other_tp_ranks_left_out_of_the_norm: TENSOR,
    router_gradient_of_one_shard_only: TENSOR,
    balance_counts_not_summed_over_tp: TENSOR,
    places_counted_per_rank: replace(TENSOR, moe="capacity, choice"),
    places_of_another_rank: replace(TENSOR, moe="capacity, choice"),
    balance_counts_not_summed_over_cp: CONTEXT,
    positions_in_the_order_of_ranks: replace(CONTEXT, moe="capacity, position"),
    one_trust_ratio_for_all_experts: replace(EXPERTS, model="llama", rule="lamb"),
    trust_ratios_of_one_part_of_an_expert: replace(INNER, model="llama", rule="lars"),
    a_part_of_an_expert_made_orthogonal: replace(INNER, rule="muon"),
    places_by_the_experts_of_the_first_layer: PYRAMID,
    balance_by_the_experts_of_the_first_layer: PYRAMID,
    slices_that_know_of_no_earlier_ones: SLICED,
    balance_counts_without_later_slices: SLICED,
    places_of_earlier_slices_free_again: SLICED,
    noise_of_the_first_slice_in_all: replace(SLICED, moe="sliced"),
}
