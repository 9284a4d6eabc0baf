"""Expert replicas: which rows go to which slot, and what replicas exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe import replicas
from megapipe.layers.moe.chunks import dispatch_chunks
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.moe.permutation import Permutation
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.weight_grad import main_grad

COPIES = ((2,), (0, 1))
"""On two ranks that own experts 0 and 1, and 2 and 3."""


@dataclass
class Exchanges:
    """All-to-alls of ranks that are all in this process: what a rank gets is there when it waits,
    all having sent."""

    ranks: int
    sent: list[dict[int, Sequence[Tensor]]] = field(default_factory=list)
    """For each exchange, what each rank has sent."""
    begun: dict[int, int] = field(default_factory=dict)

    def start(
        self, tensor: Tensor, axis: Axis, sends: list[int], receives: list[int]
    ) -> tuple[Tensor, Wait]:
        number = self.begun[axis.index] = self.begun.get(axis.index, -1) + 1
        if number == len(self.sent):
            self.sent.append({})
        self.sent[number][axis.index] = tensor.clone().split(sends)
        received = tensor.new_empty(sum(receives))

        def wait() -> None:
            parts = [self.sent[number][rank][axis.index] for rank in range(self.ranks)]
            assert [len(part) for part in parts] == receives
            received.copy_(torch.cat(parts))

        return received, wait


def parameter(name: str, values: Tensor) -> Parameter:
    found = Parameter(values)
    cast(Any, found).main_grad = torch.zeros_like(values)
    cast(Any, found).spec = SimpleNamespace(name=name)
    return found


def ranks_with(copies: tuple[tuple[int, ...], ...], etp: int = 1) -> list[ExpertReplicas]:
    """Return replicas of four experts; part p of expert e has weights 10 e + p and bias -e."""
    present, members = ExpertMap.even(4, len(copies), 2), len(copies) * etp
    found = []
    for index in range(members):
        rank, part = divmod(index, etp)
        own = torch.tensor(present.owned(rank), dtype=torch.float32)
        up = parameter("up", (10 * own + part).view(-1, 1, 1).repeat(1, 2, 3))
        bias = parameter("bias", -own.view(-1, 1).repeat(1, 2))
        axis = Axis(members, index, tuple(range(members)), None)
        found.append(
            ExpertReplicas([up, bias], ExpertOwners(present, rank), axis, etp, len(copies))
        )
        found[-1].set_map(present.with_replicas(copies))
    return found


def test_rows_go_to_the_own_rank_if_it_has_the_expert() -> None:
    first, second = ranks_with(COPIES)
    choice = torch.tensor([[0, 1], [2, 3], [~0, ~3]], dtype=torch.int16)
    assert first.num_slots == 8
    assert first.to_slots(choice).tolist() == [[0, 1], [2, 5], [~0, ~3]]
    assert second.to_slots(choice).tolist() == [[6, 7], [4, 5], [~0, ~3]]
    assert first.to_slots(choice).dtype == torch.int16


def test_without_copies_places_are_experts() -> None:
    places, _ = ranks_with(((), ()))
    choice = torch.tensor([[0, 3], [~1, 2]], dtype=torch.int16)
    assert places.to_slots(choice) is choice
    assert (places.num_slots, places.replicas_per_rank) == (4, 0)
    assert places.start_grad_return() is None


@pytest.mark.parametrize("etp", [1, 2])
def test_copies_get_weights_and_give_gradients(etp: int) -> None:
    ranks = ranks_with(COPIES, etp)
    exchanges = Exchanges(len(ranks))
    with mock.patch.object(replicas, "start_all_to_all", exchanges.start):
        for places in ranks:
            places.start_broadcast()
            places.start_broadcast()
        assert len(exchanges.sent) == 1, "weights that have not changed leave once"
        for index, places in enumerate(ranks):
            rank, part = divmod(index, etp)
            up, bias = (places.weights(p) for p in places._parameters)
            own = COPIES[rank]
            assert up[: len(own)].tolist() == [[[10.0 * e + part] * 3] * 2 for e in own]
            assert bias[: len(own)].tolist() == [[-float(e)] * 2 for e in own]
            assert not up[len(own) :].any(), "an empty slot"
        for places in ranks:
            for p in places._parameters:
                for number, grad in enumerate(places.main_grads(p)):
                    grad.fill_(10.0**number)
        begun = [places.start_grad_return() for places in ranks]
        for places, coming in zip(ranks, begun, strict=True):
            assert coming is not None
            received, wait = coming
            wait()
            places.add_returned_grads(received)
    for index, places in enumerate(ranks):
        wanted = [[101.0, 1010.0], [101.0, 10.0]][index // etp]
        for p in places._parameters:
            of_experts = main_grad(p).flatten(1)
            assert of_experts.tolist() == [[w] * of_experts.shape[1] for w in wanted]
        places.zero_grad()
        for p in places._parameters:
            assert not any(grad.any() for grad in places.main_grads(p)[2:])


def test_gradients_are_added_by_rank() -> None:
    """The owner's gradient comes first, then those of the replicas: (1 + 2^-53) + 2^-53 is 1."""
    present, given = ExpertMap.even(3, 3, 1), (1.0, 2.0**-53, 2.0**-53)
    ranks = []
    for rank, grad in enumerate(given):
        own = parameter("up", torch.zeros(1, 1, 1, dtype=torch.float64))
        ranks.append(
            ExpertReplicas([own], ExpertOwners(present, rank), Axis(3, rank, (0, 1, 2), None), 1, 3)
        )
        ranks[-1].set_map(present.with_replicas([[], [0], [0]]))
        ranks[-1].main_grads(own)[1 if rank else 0].fill_(grad)
    exchanges = Exchanges(3)
    with mock.patch.object(replicas, "start_all_to_all", exchanges.start):
        coming, *_ = [places.start_grad_return() for places in ranks]
        assert coming is not None
        received, wait = coming
        wait()
        ranks[0].add_returned_grads(received)
    assert main_grad(ranks[0]._parameters[0]).item() == 1.0


def test_changed_weights_leave_again() -> None:
    ranks = ranks_with(COPIES)
    exchanges = Exchanges(2)
    with mock.patch.object(replicas, "start_all_to_all", exchanges.start):
        for number in range(2):
            for places in ranks:
                places.start_broadcast()
            found = [places.weights(places._parameters[0])[0].unique() for places in ranks]
            assert torch.cat(found).tolist() == [20 + number, number]
            for places in ranks:
                places.mark_stale()
                places._parameters[0].data.add_(1)
        assert len(exchanges.sent) == 2


def test_copies_are_a_chunk_of_their_own() -> None:
    """Two ranks have three of six experts and a replica each, in slots 3 and 7."""
    counts = [[2, 0, 1, 4, 3, 1, 0, 0], [0, 1, 2, 0, 0, 4, 1, 5]]
    first = dispatch_chunks(counts, 0, 1, 2, 1)
    assert [c.experts for c in first] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert [[c.rows_between(0, member) for member in (0, 1)] for c in first] == [
        [2, 4],
        [1, 0],
        [4, 0],
    ]
    assert [c.token_rows for c in first] == [slice(0, 6), slice(6, 7), slice(7, 11)]
    assert [(c.expert_rows, c.ends) for c in first] == [
        (slice(0, 3), [2, 3]),
        (slice(3, 6), [3]),
        (slice(6, 10), [4]),
    ]


def test_rows_of_copies_come_last() -> None:
    """Two ranks have two experts and a replica each, and no chunks: slots 2 and 5 have replicas."""
    choice = torch.tensor([[2, 0], [5, ~2], [4, 1], [~1, 3]], dtype=torch.int16)
    rows = Permutation.of(choice, 6, 3, 1, 1)
    assert rows.choice_of_row[:6].tolist() == [1, 5, 7, 4, 0, 2]
    assert rows.row_of_choice.tolist() == [[4, 0], [5, 6], [3, 1], [6, 2]]
