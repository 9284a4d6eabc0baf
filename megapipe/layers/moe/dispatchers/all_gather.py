"""All-gather dispatch: every rank gathers all tokens of the group, with their weights and choices,
and selects the rows of its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.distributed.collectives import Wait, start_all_gather_new
from megapipe.layers.moe.dispatch import Dispatch, Dispatcher, DispatchPlan, Prefetch
from megapipe.layers.moe.padding import among_choices
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.layers.moe.row_codec import UNCODED, RowCodec


@dataclass(frozen=True)
class AllGatherDispatcher(Dispatcher):
    """Gathers the tokens of all ranks; results return as rows."""

    def arrival(self, choice: Tensor, counts: ExpertCounts, plan: DispatchPlan) -> Tensor:
        """Return, for each row of the local experts in order, the index of its choice among the
        choices of all ranks."""
        of_each = plan.chunks[0].of_each
        everyone, wait = start_all_gather_new(choice.contiguous().view(torch.uint8), self.ep)
        wait()
        numbers = everyone.view(choice.dtype).int()
        numbers -= of_each * (self.ep.index // self.etp)
        elsewhere = (numbers < 0) | (numbers >= of_each)  # or the choice is dropped
        numbers.masked_fill_(elsewhere, of_each)
        if self.pad:
            return among_choices(numbers.view(-1, *choice.shape), of_each, counts)
        return numbers.flatten().argsort(stable=True)[: plan.local_expert_rows].clone()

    def restore(self, plan: DispatchPlan, *tensors: Tensor) -> Dispatch:
        return AllGatherDispatch(plan, *tensors)


class AllGatherDispatch(Dispatch):
    """Dispatch of gathered tokens; `arrival` has indices among the choices of all ranks."""

    def dispatch_tokens(self, x: Tensor) -> Prefetch[Tensor]:
        k, at = self.rows.row_of_choice.shape[1], self.rows.at
        codec = self.plan.dispatcher.row_codec
        return _Tokens(self, x, lambda whole, choices: at(whole, choices // k), codec)

    def dispatch_weights(self, values: Tensor) -> Prefetch[Tensor]:
        at = self.rows.at
        return _Tokens(self, values, lambda whole, number: at(whole.flatten(), number), UNCODED)

    def to_source_order(self, number: int, rows: Tensor) -> Tensor:
        dispatcher, chunks = self.plan
        if dispatcher.pad:  # equally many rows for each expert and rank
            each = rows.unflatten(0, (len(chunks[number].ends), dispatcher.ep.size, -1))
            return each.transpose(0, 1).flatten(0, 2)
        source = self.arrival[number] // self.rows.row_of_choice.numel()
        return rows[source.argsort(stable=True)]


class _Tokens:
    """Transfer of the values of all tokens of the group, gathered once for all chunks."""

    def __init__(
        self,
        dispatch: AllGatherDispatch,
        own: Tensor,
        take: Callable[[Tensor, Tensor], Tensor],
        codec: RowCodec,
    ) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._values, self._take = own, take
        self._gathering: list[tuple[Tensor, Wait]] = []

    def start(self, number: int) -> None:
        if number == 0:
            own = self._codec.encode(self._values)
            self._gathering.append(start_all_gather_new(own, self._dispatch.plan.dispatcher.ep))

    def start_next_hop(self, number: int) -> None:
        """Start nothing: there is only one exchange."""

    def wait(self, number: int) -> Tensor:
        if number == 0:
            coded, wait = self._gathering.pop()
            wait()
            self._values = self._codec.decode(coded, self._values.dtype)
        return self._take(self._values, self._dispatch.arrival[number])
