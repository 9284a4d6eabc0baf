"""Dispatch and combine: rows are sent to the ranks of their experts, and results are sent back.

A :class:`Dispatcher` has the settings of a run, and is made once per stage. For each micro-batch
and layer it makes a :class:`Dispatch`, which sends values of tokens and of their choices to the
experts, chunk by chunk. The dispatch's :class:`Combine` sends results back. The classes in
:mod:`megapipe.layers.moe.dispatchers`, one file each, decide how values are sent; docs/extending.md
shows how to write another. Dispatch is collective over the expert-parallel group: ranks without
rows to send or to receive take part.

The rows of an expert are ordered by source rank, then by position. Results return as rows and are
summed on the tokens' rank, so the results of all dispatchers are bitwise equal. If an expert's FFN
hidden size is split over etp ranks, each etp rank gets the expert's rows, and the tokens' rank sums
the partial results in rank order.

Rows are sent in expert chunks (:mod:`megapipe.layers.moe.chunks`): while a rank computes a chunk,
rows of the next chunk and results of the previous chunk are in flight. Each exchange is an
asynchronous collective with a late wait; on a GPU it runs on NCCL's own stream.

Rows may be encoded on the wire (:mod:`megapipe.layers.moe.row_codec`): all rows, even if they stay
on their rank. Choices, their weights, the weights' gradients and counts are never encoded.
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
    """Transfer of rows, or of expert weights, to the ranks that compute the experts, by chunk."""

    def start(self, number: int) -> None:
        """Start sending chunk `number`."""

    def start_next_hop(self, number: int) -> None:
        """Start the next exchange of chunk `number`, if its rows take several exchanges (within
        nodes, then between nodes)."""

    def wait(self, number: int) -> T_co:
        """Return the chunk's rows [rows, ...] in the order of experts, or the chunk's weights."""


@dataclass(frozen=True)
class Dispatcher(ABC):
    """Common settings of all dispatchers, and the methods that layers call.

    A user-defined dispatcher derives from this class, or from one of
    :mod:`megapipe.layers.moe.dispatchers`.
    """

    ep: Axis
    """Group of ep x etp ranks over which the experts are split."""
    etp: int = 1
    """Number of adjacent ranks of `ep` that share one expert."""
    chunks: int = 1
    """Number of expert chunks in which a rank computes its experts."""
    codec: Codec = "none"
    """Wire type of dispatched rows and of gathered tokens."""
    pad: bool = False
    """Whether rows are padded to the capacity, so that they need not be counted."""
    count: Callable[[Tensor, int, Axis], ExpertCounts] = count_rows
    """Function that counts the rows per expert, unless rows are padded."""

    hops: ClassVar[int] = 1
    """Number of consecutive exchanges of a row: 2 if it is first sent within its node, else 1."""

    @classmethod
    def settings(cls, config: ExpertsConfig, mesh: ParallelMesh) -> dict[str, Any]:
        """Return the arguments for the constructor of a run's dispatcher."""
        return {
            "ep": mesh.ep,
            "etp": mesh.grid.etp,
            "chunks": config.number_of_chunks,
            "codec": config.wire_dtype,
            "pad": config.pad_to_capacity,
        }

    def dispatch(self, choice: Tensor, counts: ExpertCounts, replicas: int = 0) -> Dispatch:
        """Make the dispatch of a micro-batch.

        Args:
            choice: [tokens, top_k], int16: slot of each choice, or ~slot if the choice is dropped.
                Each rank has slots for its experts and, after them, for `replicas` replicas.
            counts: number of rows that each rank of the group has for each slot.
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
        """Return, for the local experts' rows in the order of chunks and experts, their indices
        among the received values: [rows], int64. Not called if all rows stay on this rank."""

    @abstractmethod
    def restore(self, plan: DispatchPlan, *tensors: Tensor) -> Dispatch:
        """Make a dispatch from its plan and the :attr:`Dispatch.tensors` that autograd saved."""

    @property
    def counting(self) -> Axis:
        """Group whose ranks exchange their row counts."""
        return self.ep

    @property
    def row_codec(self) -> RowCodec:
        """Row codec that :attr:`codec` names."""
        return CODECS[self.codec]

    def weights(
        self,
        parameters: Parameters,
        chunks: Sequence[ExpertChunk],
        replicas: ExpertReplicas | None,
        *,
        adds_bias: bool,
    ) -> Prefetch[ExpertWeights]:
        """Return the transfer of the weights of the experts that this rank computes; `adds_bias`:
        this rank adds the down-projection bias."""
        return LocalExperts(parameters, chunks, replicas, adds_bias=adds_bias)

    def grads(self, chunks: Sequence[ExpertChunk], replicas: ExpertReplicas | None) -> ExpertGrads:
        """Return the accumulators for gradients of the experts that this rank computes."""
        return ExpertGrads(replicas)

    def dispatch_steps(self, moved: Moved) -> list[Step]:
        """List the exchanges of rows from the tokens to the experts, by default one all-to-all.
        `moved(source, target)`: number of rows from one member of the group to another."""
        return dispatch_steps(moved, self.ep, None)

    def combine_steps(self, moved: Moved) -> list[Step]:
        """List the exchanges of rows from the experts to the tokens, by default one all-to-all."""
        return combine_steps(moved, self.ep, None)

    start_exchange = staticmethod(start_exchange)
    """Function that starts an exchange: :func:`megapipe.layers.moe.transfer.start_exchange`."""

    def plan(self, counts: ExpertCounts, replicas: int) -> DispatchPlan:
        """Plan the expert chunks of a micro-batch whose rows are sent to the experts' ranks."""
        arguments = self.ep.index, self.etp, self.chunks, replicas
        return DispatchPlan(self, dispatch_chunks(counts.by_rank, *arguments))

    def permutation(
        self, choice: Tensor, counts: ExpertCounts, plan: DispatchPlan, replicas: int
    ) -> Permutation:
        """Order the local tokens' rows by chunk and expert."""
        of_each = plan.chunks[0].of_each
        if self.pad:
            return PaddedPermutation.at_capacity(choice, counts, of_each, self.chunks)
        return Permutation.of(choice, plan.local_token_rows, of_each, self.chunks, replicas)


class DispatchPlan(NamedTuple):
    """Expert chunks and row counts of a micro-batch's dispatch in a layer, known to the host."""

    dispatcher: Dispatcher
    """Dispatcher that sends the rows; for fetched experts, a single-rank one that sends none."""
    chunks: Sequence[ExpertChunk]

    @property
    def local_token_rows(self) -> int:
        """Number of rows of the local tokens."""
        return int(self.chunks[-1].token_rows.stop)

    @property
    def local_expert_rows(self) -> int:
        """Number of rows of the local experts."""
        return int(self.chunks[-1].expert_rows.stop)

    @property
    def ends(self) -> list[int]:
        """End of each local expert's rows: cumulative row counts."""
        return [chunk.expert_rows.start + end for chunk in self.chunks for end in chunk.ends]

    @property
    def alone(self) -> bool:
        """Whether all rows stay on this rank."""
        return self.dispatcher.ep.size == 1


class Dispatch(ABC):
    """The dispatch of a micro-batch's rows in a layer."""

    def __init__(self, plan: DispatchPlan, order: Tensor, slots: Tensor, *arrival: Tensor) -> None:
        self.plan = plan
        rows = PaddedPermutation if plan.dispatcher.pad else Permutation
        self.rows = rows(order, slots, plan.local_token_rows)
        self.arrival = arrival
        """For each chunk, the index of each row among the received values: [local rows], int64, in
        the order of experts. An empty row has an index beyond the values. () if all rows stay on
        this rank."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors from which :meth:`Dispatcher.restore` rebuilds this dispatch, with the plan."""
        return self.rows.choice_of_row, self.rows.row_of_choice, *self.arrival

    @abstractmethod
    def dispatch_tokens(self, x: Tensor) -> Prefetch[Tensor]:
        """Return the transfer of tokens x [tokens, h], or of their gradients, to the experts."""

    @abstractmethod
    def dispatch_weights(self, values: Tensor) -> Prefetch[Tensor]:
        """Return the transfer of the choices' weights [tokens, top_k] to the experts."""

    @abstractmethod
    def to_source_order(self, number: int, rows: Tensor) -> Tensor:
        """Reorder rows of chunk `number` from the order of experts to the order of source ranks."""

    def pipelined_chunks(
        self, weights: Prefetch[W], *values: Prefetch[Tensor]
    ) -> Iterator[tuple[ExpertChunk, W, list[Tensor]]]:
        """Yield each chunk with its weights and inputs, once the next chunk's transfers have
        started."""
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
        """Return the Combine for the experts' output rows; nothing is sent yet."""
        return Combine(self, self.plan.dispatcher.row_codec)

    def combine_weight_grads(self) -> Combine:
        """Return the Combine for the gradients of the choices' weights, one value per row."""
        return Combine(self, UNCODED)


class Combine:
    """Sends the experts' results back to the tokens."""

    def __init__(self, dispatch: Dispatch, codec: RowCodec) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._transfers: list[Transfer] = []

    def send(self, rows: Tensor) -> None:
        """Start sending the results of the next chunk; `rows` are in the order of experts."""
        for transfer in self._transfers:
            transfer.start_next_hop()
        dispatcher, chunks = self._dispatch.plan
        number = len(self._transfers)
        steps = dispatcher.combine_steps(chunks[number].rows_between)
        rows = self._dispatch.to_source_order(number, rows)
        self._transfers.append(Transfer(rows, steps, self._codec, dispatcher.start_exchange))

    def wait(self) -> Tensor:
        """Wait for the results of the local tokens' rows, and return them. If etp ranks share an
        expert, their partial results are summed in fp32 or fp64."""
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
    """Concatenate the values of all chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
