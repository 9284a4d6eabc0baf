"""Room for all rows that there can be: which row is whose."""

from __future__ import annotations

import pytest
import torch

from megapipe.layers.moe.padding import PaddedPermutation, among_choices, padded_counts
from megapipe.layers.moe.permutation import Permutation
from megapipe.layers.moe.routing import route_tokens
from megapipe.layers.moe.specs import Routing, padded_rows
from megapipe.ops.moe.elementwise import TorchRows


def test_rows_are_those_of_the_table() -> None:
    """Two sequences have the tokens a c e and b d f; the last token is dropped."""
    choice = torch.tensor([[0], [1], [0], [0], [1], [~1]], dtype=torch.int16)
    told = padded_counts(2, 1, 2, 3)
    assert told.by_rank == [[6, 6]]
    rows = PaddedPermutation.at_capacity(choice, told, 2, 1)
    assert rows.row_of_choice.flatten().tolist() == [0, 9, 1, 3, 6, 12]
    assert rows.choice_of_row.tolist() == [0, 2, 6, 3, 6, 6, 4, 6, 6, 1, 6, 6]
    values = torch.arange(1.0, 7).unsqueeze(1)
    found = rows.permute(values).flatten()
    assert found.tolist() == [1, 3, 0, 4, 0, 0, 5, 0, 0, 2, 0, 0]
    assert rows.permute_weights(values, slice(6, 12)).tolist() == [5, 0, 0, 2, 0, 0]
    total = rows.unpermute(found.unsqueeze(1), torch.float64, TorchRows())
    assert total.flatten().tolist() == [1, 2, 3, 4, 5, 0]
    assert rows.unpermute_weights(found).flatten().tolist() == [1, 2, 3, 4, 5, 0]


def test_rows_of_a_chunk_are_neighbours() -> None:
    """Two ranks have experts 0, 1 and 2, 3; chunks are 0, 2 and 1, 3."""
    choice = torch.tensor([[3, 0], [2, 1]], dtype=torch.int16)
    rows = PaddedPermutation.at_capacity(choice, padded_counts(4, 2, 1, 2), 2, 2)
    assert rows.row_of_choice.tolist() == [[6, 0], [2, 4]]
    assert rows.choice_of_row.tolist() == [1, 4, 2, 4, 3, 4, 0, 4]


def test_choices_of_all_ranks_are_put_into_the_order_of_experts_and_then_of_ranks() -> None:
    """Two ranks have two tokens each. The first rank, which has expert 0, orders the choices."""
    experts = torch.tensor([[[0], [0]], [[1], [0]]], dtype=torch.int32)
    assert among_choices(experts, 1, padded_counts(2, 2, 1, 2)).tolist() == [0, 1, 3, 4]
    assert among_choices(experts, 1, padded_counts(2, 2, 2, 1)).tolist() == [0, 1, 4, 3]


@pytest.mark.parametrize("capacity", [0.3, 1.0, 1.7])
def test_every_choice_that_is_not_dropped_has_a_row_of_its_own(capacity: float) -> None:
    """In the order of the rows that are counted, but for those of several sequences."""
    routing, sequences, length = Routing(5, 2, capacity=capacity), 3, 8
    p = torch.randn(length * sequences, 5, generator=torch.Generator().manual_seed(2)).softmax(-1)
    choice = route_tokens(p, routing, sequences)
    places = routing.expert_capacity(length)
    assert places is not None
    told = padded_counts(5, 1, sequences, min(places, length))
    found = PaddedPermutation.at_capacity(choice, told, 5, 1)
    assert (
        found.num_rows
        == padded_rows(routing, len(p), sequences, length)
        == len(found.choice_of_row)
    )
    counted = Permutation.of(choice, int((choice >= 0).sum()))
    own = found.choice_of_row[found.choice_of_row < choice.numel()]
    assert sorted(own.tolist()) == sorted(counted.choice_of_row[: counted.num_rows].tolist())
    kept, numbers = choice >= 0, torch.arange(choice.numel()).view(choice.shape)
    assert found.choice_of_row[found.row_of_choice[kept]].equal(numbers[kept])
    line = found.row_of_choice[kept] // min(places, length)
    assert (line // sequences).equal(choice[kept].long())
    assert (line % sequences).equal(numbers[kept] // 2 % sequences)
