"""Faults of experts with padded rows, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from megapipe.layers.moe import experts, padding
from megapipe.layers.moe.dispatchers.all_gather import AllGatherDispatch
from megapipe.layers.moe.padding import PaddedPermutation
from megapipe.layers.moe.permutation import ExpertCounts
from tests.parity.cases import Case
from tests.parity.faults import Patch

ALONE = Case(moe="capacity, choice", masked=0.3, layers=2, pad=True)
SPLIT = replace(ALONE, dp=2, ep=2)
GATHERED = replace(SPLIT, dispatch="all_gather")


def empty_rows_are_not_masked() -> Patch:
    """Fill empty rows with the last choice, which then counts twice in bias gradients."""

    def wrong(self: PaddedPermutation, values: Tensor, index: Tensor) -> Tensor:
        return values[index.clamp(max=len(values) - 1)]

    return mock.patch.object(PaddedPermutation, "at", wrong)


def choices_share_a_place() -> Patch:
    """Put every two choices of an expert into one row; the later one wins."""
    places = padding.occurrence_index

    def wrong(values: Tensor, size: int) -> Tensor:
        return places(values, size) // 2 * 2

    return mock.patch.object(padding, "occurrence_index", wrong)


def there_is_a_place_too_few() -> Patch:
    """Reserve a row too few: an expert's last row is the first of the next."""
    room = experts.padded_counts

    def wrong(number: int, ranks: int, sequences: int, places: int) -> ExpertCounts:
        return room(number, ranks, sequences, places - 1)

    return mock.patch.object(experts, "padded_counts", wrong)


def dropped_choices_have_the_last_row() -> Patch:
    add_up = PaddedPermutation.unpermute

    def wrong(self: PaddedPermutation, *rest: Any) -> Tensor:
        last = self._replace(row_of_choice=self.row_of_choice.clamp(max=self.num_rows - 1))
        return add_up(last, *rest)

    return mock.patch.object(PaddedPermutation, "unpermute", wrong)


def results_leave_in_the_order_of_experts() -> Patch:
    return mock.patch.object(AllGatherDispatch, "to_source_order", lambda self, number, rows: rows)


FAULTS: dict[Callable[[], Patch], Case] = {
    empty_rows_are_not_masked: ALONE,
    choices_share_a_place: ALONE,
    there_is_a_place_too_few: SPLIT,
    dropped_choices_have_the_last_row: SPLIT,
    results_leave_in_the_order_of_experts: GATHERED,
}
