"""Faults of expert dispatch, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.layers.moe import transfer
from megapipe.layers.moe.dispatch import Combine
from megapipe.layers.moe.dispatchers.all_gather import AllGatherDispatch, _Tokens
from megapipe.layers.moe.dispatchers.fetch import FetchedExpertGrads
from megapipe.layers.weight_grad import main_grad
from tests.parity.cases import Case
from tests.parity.faults import Patch

GATHERED = Case(dp=2, ep=2, moe="top 2", masked=0.3, layers=2, dispatch="all_gather")
CHUNKS = replace(GATHERED, dispatch="all_to_all", expert_chunks=2)
FETCHED = replace(CHUNKS, dispatch="fetch")
HOPS = replace(GATHERED, dp=4, ep=4, dispatch="hierarchical", node=2)


def tokens_of_another_rank_taken() -> Patch:
    take = _Tokens.wait

    def wrong(self: _Tokens, number: int) -> Tensor:
        take(self, number)
        moved = self._values.roll(len(self._values) // 2, 0)
        return self._take(moved, self._dispatch.arrival[number])

    return mock.patch.object(_Tokens, "wait", wrong)


def results_leave_in_the_order_of_experts() -> Patch:
    return mock.patch.object(AllGatherDispatch, "to_source_order", lambda self, number, rows: rows)


def results_of_chunks_come_home_in_reverse() -> Patch:
    arrived = Combine.wait

    def wrong(self: Combine) -> Tensor:
        chunks = self._dispatch.plan.chunks
        parts = arrived(self).split(
            [chunk.token_rows.stop - chunk.token_rows.start for chunk in chunks]
        )
        return torch.cat(parts[::-1])

    return mock.patch.object(Combine, "wait", wrong)


def rows_are_passed_on_in_the_order_of_arrival() -> Patch:
    def wrong(rows: Tensor, blocks: Any) -> Tensor:
        return rows

    return mock.patch.object(transfer, "_permuted", wrong)


def gradients_of_fetched_experts_stay() -> Patch:
    def wrong(self: FetchedExpertGrads, grad: Tensor, parameter: Parameter) -> None:
        n, group = len(main_grad(parameter)), self._group
        first = n * (group.ep.index // group.etp)
        main_grad(parameter).add_(grad[first : first + n])

    return mock.patch.object(FetchedExpertGrads, "finish", wrong)


def fetched_gradients_in_the_order_of_chunks() -> Patch:
    def wrong(self: FetchedExpertGrads, grad: Tensor, parameter: Parameter) -> None:
        parts = self._group.ep.size // self._group.etp
        self._group.reduce_scatter_grads(grad.unflatten(0, (parts, -1)), parameter)

    return mock.patch.object(FetchedExpertGrads, "finish", wrong)


FAULTS: dict[Callable[[], Patch], Case] = {
    tokens_of_another_rank_taken: GATHERED,
    results_leave_in_the_order_of_experts: GATHERED,
    results_of_chunks_come_home_in_reverse: CHUNKS,
    rows_are_passed_on_in_the_order_of_arrival: HOPS,
    gradients_of_fetched_experts_stay: replace(FETCHED, expert_chunks=1),
    fetched_gradients_in_the_order_of_chunks: FETCHED,
}
