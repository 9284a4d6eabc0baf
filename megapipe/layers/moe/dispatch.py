"""Dispatch and combine: tokens go to the ranks that have their experts, and results come back.

A :class:`Dispatcher` has the settings of a run, and is made once for a stage. For each micro-batch
and layer it makes a :class:`Dispatch`, which sends values of tokens and of their choices to the
experts, chunk by chunk, and whose :class:`Combine` sends results back. How they travel is said by
the classes of :mod:`megapipe.layers.moe.dispatchers`, one file for each; docs/extending.md shows
how to write another. All ranks of the expert-parallel group dispatch together, also those without
rows, and those whose experts get none.

The rows of an expert are in the order of the ranks that they are from, then of positions, and
results come back as rows, which are added up where the tokens are: so the way that they take does
not change a bit. Where the width of an expert is split over etp ranks, each of these gets its rows,
and their results are added up in the order of the ranks, where the tokens are.

Rows travel in chunks of experts (:mod:`megapipe.layers.moe.chunks`): before a rank computes with
one, the next is being sent, and results leave while the next is computed. Each exchange is a
collective that has begun and is waited for later, so on a GPU it runs on NCCL's own stream.

Values of rows may be coded while they travel (:mod:`megapipe.layers.moe.row_codec`), all of them,
also those that stay on their rank; weights of choices and their gradients, choices and counts are
never coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megapipe.config.experts import ExpertsConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh
from megapipe.layers.moe.chunks import ExpertChunk, dispatch_chunks
from megapipe.layers.moe.padding import PaddedPermutation
from megapipe.layers.moe.permutation import ExpertCounts, Permutation, count_rows
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.moe.row_codec import CODECS, UNCODED, RowCodec
from megapipe.layers.moe.specs import Codec
from megapipe.layers.moe.transfer import (
    Moved,
    Step,
    Transfer,
    combine_steps,
    dispatch_steps,
    start_exchange,
)
from megapipe.layers.moe.weights import ExpertGrads, ExpertWeights, LocalExperts, Parameters

W = TypeVar("W")
T_co = TypeVar("T_co", covariant=True)


class Prefetch(Protocol[T_co]):
    """Values, or weights, that are sent to where experts are computed, chunk by chunk."""

    def start(self, number: int) -> None:
        """Start sending a chunk."""

    def start_next_hop(self, number: int) -> None:
        """Start the next hop of a chunk."""

    def wait(self, number: int) -> T_co:
        """Return the values of the chunk, [rows, ...] in the order of experts, or its weights."""


@dataclass(frozen=True)
class Dispatcher(ABC):
    """How tokens get to their experts: settings that all dispatchers have, and what layers ask.

    A user-defined dispatcher derives from this class, or from one of
    :mod:`megapipe.layers.moe.dispatchers`.
    """

    ep: Axis
    """The ranks over which experts are split, ep x etp."""
    etp: int = 1
    """Neighbours among them that have parts of the same experts."""
    chunks: int = 1
    """Parts in which a rank computes its experts."""
    codec: Codec = "none"
    """How values of rows, and of tokens that are gathered, are coded."""
    pad: bool = False
    """There is room for all rows that there can be, so these are not counted."""
    count: Callable[[Tensor, int, Axis], ExpertCounts] = count_rows
    """Counts rows where they are counted."""

    hops: ClassVar[int] = 1
    """Exchanges that rows take, one after the other."""

    @classmethod
    def settings(cls, config: ExpertsConfig, mesh: ParallelMesh) -> dict[str, Any]:
        """Return the arguments of the dispatcher of a run."""
        return {
            "ep": mesh.ep,
            "etp": mesh.grid.etp,
            "chunks": config.number_of_chunks,
            "codec": config.codec,
            "pad": config.pad,
        }

    def dispatch(self, choice: Tensor, counts: ExpertCounts, replicas: int = 0) -> Dispatch:
        """Make the dispatch of a micro-batch.

        Args:
            choice: [tokens, top_k], int16: the slot of each choice, ~slot where it is dropped. The
                slots of each rank are its experts and, after them, so many `replicas`.
            counts: rows that each rank of the group has for each slot.
        """
        plan = self.plan(counts, replicas)
        rows = self.permutation(choice, counts, plan, replicas)
        if plan.alone:
            return self.restore(plan, rows.choice_of_row, rows.row_of_choice)
        arrival = self.arrival(choice, counts, plan)
        of_chunks = arrival.split([chunk.ends[-1] for chunk in plan.chunks])
        return self.restore(plan, rows.choice_of_row, rows.row_of_choice, *of_chunks)

    @abstractmethod
    def arrival(self, choice: Tensor, counts: ExpertCounts, plan: DispatchPlan) -> Tensor:
        """Return [rows of the experts here], int64: in the order of chunks and experts, which of
        what arrives they are. Not asked for where all rows stay on this rank."""

    @abstractmethod
    def restore(self, plan: DispatchPlan, *tensors: Tensor) -> Dispatch:
        """Make a dispatch from its plan and tensors, which the backward has kept."""

    @property
    def counting(self) -> Axis:
        """The ranks that tell each other how many rows they have."""
        return self.ep

    @property
    def row_codec(self) -> RowCodec:
        """The codec of :attr:`codec`."""
        return CODECS[self.codec]

    def weights(
        self,
        parameters: Parameters,
        chunks: Sequence[ExpertChunk],
        replicas: ExpertReplicas | None,
        *,
        adds_bias: bool,
    ) -> Prefetch[ExpertWeights]:
        """Return the weights of the experts that are computed here; `adds_bias`: this rank adds the
        bias of the second product."""
        return LocalExperts(parameters, chunks, replicas, adds_bias=adds_bias)

    def grads(self, chunks: Sequence[ExpertChunk], replicas: ExpertReplicas | None) -> ExpertGrads:
        """Return where the gradients of the experts that are computed here are added."""
        return ExpertGrads(replicas)

    def dispatch_steps(self, moved: Moved) -> list[Step]:
        """List the exchanges of rows from the tokens to the experts, by default one all-to-all;
        `moved` counts the rows of one member of the group for another."""
        return dispatch_steps(moved, self.ep, None)

    def combine_steps(self, moved: Moved) -> list[Step]:
        """List the exchanges of rows from the experts to the tokens, by default one all-to-all."""
        return combine_steps(moved, self.ep, None)

    start_exchange = staticmethod(start_exchange)
    """Starts an exchange: :func:`megapipe.layers.moe.transfer.start_exchange`."""

    def plan(self, counts: ExpertCounts, replicas: int) -> DispatchPlan:
        """Plan the chunks of a micro-batch, whose rows go to the ranks of their experts."""
        given = self.ep.index, self.etp, self.chunks, replicas
        return DispatchPlan(self, dispatch_chunks(counts.by_rank, *given))

    def permutation(
        self, choice: Tensor, counts: ExpertCounts, plan: DispatchPlan, replicas: int
    ) -> Permutation:
        """Put the rows of the tokens here into the order of chunks and experts."""
        of_each = plan.chunks[0].of_each
        if self.pad:
            return PaddedPermutation.at_capacity(choice, counts, of_each, self.chunks)
        return Permutation.of(choice, plan.local_token_rows, of_each, self.chunks, replicas)


class DispatchPlan(NamedTuple):
    """All that the host knows of a micro-batch's dispatch in a layer."""

    dispatcher: Dispatcher
    """The dispatcher that sends rows; for fetched experts one that sends none."""
    chunks: Sequence[ExpertChunk]

    @property
    def local_token_rows(self) -> int:
        """Rows of the tokens of this rank."""
        return int(self.chunks[-1].token_rows.stop)

    @property
    def local_expert_rows(self) -> int:
        """Rows of the experts of this rank."""
        return int(self.chunks[-1].expert_rows.stop)

    @property
    def ends(self) -> list[int]:
        """Ends of the rows of each expert of this rank."""
        return [chunk.expert_rows.start + end for chunk in self.chunks for end in chunk.ends]

    @property
    def alone(self) -> bool:
        """Whether all rows stay on this rank."""
        return self.dispatcher.ep.size == 1


class Dispatch(ABC):
    """The dispatch of the rows of a micro-batch in a layer."""

    def __init__(self, plan: DispatchPlan, order: Tensor, slots: Tensor, *arrival: Tensor) -> None:
        self.plan = plan
        rows = PaddedPermutation if plan.dispatcher.pad else Permutation
        self.rows = rows(order, slots, plan.local_token_rows)
        self.arrival = arrival
        """[rows of a chunk here] of each chunk, int64: in the order of experts, which of what
        arrives they are, or beyond all of it; nothing where all rows stay on this rank."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors from which, with the plan, :meth:`Dispatcher.restore` makes the same."""
        return self.rows.choice_of_row, self.rows.row_of_choice, *self.arrival

    @abstractmethod
    def dispatch_tokens(self, x: Tensor) -> Prefetch[Tensor]:
        """Send values of tokens [tokens, h] to the experts."""

    @abstractmethod
    def dispatch_weights(self, values: Tensor) -> Prefetch[Tensor]:
        """Send values of choices [tokens, top_k] to the experts."""

    @abstractmethod
    def to_source_order(self, number: int, rows: Tensor) -> Tensor:
        """Put rows of a chunk, in the order of experts, into that of the ranks that they are from,
        and of their rows."""

    def pipelined_chunks(
        self, weights: Prefetch[W], *values: Prefetch[Tensor]
    ) -> Iterator[tuple[ExpertChunk, W, list[Tensor]]]:
        """Yield each chunk with its weights and values, once those of the next one are sent."""
        chunks, hops = self.plan.chunks, self.plan.dispatcher.hops
        every: list[Prefetch[Any]] = [weights, *values]
        for turn in range(-hops, len(chunks)):
            for ahead in range(hops, 0, -1):
                if 0 <= turn + ahead < len(chunks):
                    for each in every:
                        (each.start if ahead == hops else each.start_next_hop)(turn + ahead)
            if turn >= 0:
                here = [each.wait(turn) for each in values]
                yield chunks[turn], weights.wait(turn), here

    def combine(self) -> Combine:
        """Return what sends rows of results of experts back, none of which is sent yet."""
        return Combine(self, self.plan.dispatcher.row_codec)

    def combine_weight_grads(self) -> Combine:
        """Return what sends one value of each row back."""
        return Combine(self, UNCODED)


class Combine:
    """Results of experts that are sent back to the tokens."""

    def __init__(self, dispatch: Dispatch, codec: RowCodec) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._transfers: list[Transfer] = []

    def send(self, rows: Tensor) -> None:
        """Start sending the rows of the next chunk, in the order of experts."""
        for transfer in self._transfers:
            transfer.start_next_hop()
        dispatcher, chunks = self._dispatch.plan
        number = len(self._transfers)
        steps = dispatcher.combine_steps(chunks[number].rows_between)
        rows = self._dispatch.to_source_order(number, rows)
        self._transfers.append(Transfer(rows, steps, self._codec, dispatcher.start_exchange))

    def wait(self) -> Tensor:
        """Return [rows of the tokens here, ...], sums over etp in higher precision."""
        chunks = self._dispatch.plan.chunks
        return joined(
            [self._summed(c, each.wait()) for c, each in zip(chunks, self._transfers, strict=True)]
        )

    def _summed(self, chunk: ExpertChunk, rows: Tensor) -> Tensor:
        dispatcher = self._dispatch.plan.dispatcher
        ep, etp = dispatcher.ep, dispatcher.etp
        if etp == 1:
            return rows
        high = torch.promote_types(rows.dtype, torch.float32)
        sizes = [chunk.rows_between(ep.index, member) for member in range(ep.size)]
        parts = [part.to(high) for part in rows.split(sizes)]
        firsts = range(0, ep.size, etp)
        return torch.cat([sum(parts[i + 1 : i + etp], parts[i]) for i in firsts])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join values of all chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
