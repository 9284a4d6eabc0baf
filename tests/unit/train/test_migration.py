"""Owners of experts that follow the choices of a step: when, which, and what is saved of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.train.moe import migration
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from megapipe.train.moe.migration import Migration, OwnerChoice

SKEWED = [8.0, 8.0, 1.0, 0.0, *(9, 9, 1, 1), 8.0, 9.0, 1.0, 2.0, *(3, 3, 3, 3)]
"""Four numbers of each of two layers, and the choices of each of its experts."""
APART = ExpertMap((0, 1, 0, 1), ((), ()))
"""Owners with which each rank has 10 rows of the first layer; initially one has 18."""
BEGIN = ExpertMap.even(4, 2)


class Places:
    """A stand-in for a layer's expert replicas: the map that it has."""

    def __init__(self) -> None:
        self.owners = ExpertOwners(BEGIN, 0)

    def set_map(self, after: ExpertMap) -> None:
        self.owners.map = after


Moved = list[dict[ExpertOwners, ExpertMap]]


@pytest.fixture
def moved() -> Iterator[Moved]:
    """Yield what optimizers were asked to move, before layers took it over."""
    found: Moved = []

    def spy(_: object, after: Mapping[ExpertOwners, ExpertMap]) -> None:
        assert all(owners.map != its for owners, its in after.items())
        found.append(dict(after))

    with mock.patch.object(migration, "move_experts", spy):
        yield found


def of_two_layers(every: int = 1, worth: float = 0.0) -> tuple[Migration, Places]:
    """Make the migration of two layers on a rank that has the first one."""
    places = Places()
    choice, begin = OwnerChoice([APART], worth), {1: BEGIN, 3: BEGIN}
    given = {1: cast(Any, places)}
    return Migration(cast(Any, None), begin, {1: choice, 3: choice}, every, given), places


def test_layers_take_over_the_best_owners_every_so_many_steps(moved: Moved) -> None:
    found, places = of_two_layers(every=3)
    for step in range(2):
        found.migrate_if_due(step, SKEWED)
    assert not moved
    assert found.migrate_if_due(2, SKEWED) == {1: 2}
    assert moved == [{places.owners: APART}]
    assert found.present == {1: APART, 3: BEGIN}, "the other layer's loads are equal"
    assert places.owners.map == APART
    found.migrate_if_due(5, SKEWED)
    assert moved[1:] == [{}], "they are those that there are"


def test_experts_that_move_are_told(moved: Moved) -> None:
    maps = ExpertRebalancer({}, migration=of_two_layers()[0])
    assert maps.after_update(0, SKEWED) == "step 1: experts moved to other ranks: 2, in layer 1"
    assert maps.after_update(1, SKEWED) is None
    assert len(moved) == 2


def test_experts_stay_where_moving_them_takes_more_time_than_it_saves(moved: Moved) -> None:
    for worth, stays in ((7.0, False), (9.0, True)):
        found, places = of_two_layers(worth=worth)
        found.migrate_if_due(0, SKEWED)
        assert (places.owners.map == BEGIN) == stays, "8 rows are saved by one that each gets"


def test_owners_that_have_changed_are_saved_and_taken_over(moved: Moved) -> None:
    saved, _ = of_two_layers()
    assert saved.owners == {}
    saved.migrate_if_due(0, SKEWED)
    assert saved.owners == {"1": [0, 1, 0, 1]}
    loaded, places = of_two_layers()
    loaded.load(saved.owners)
    assert loaded.present == saved.present
    assert places.owners.map == APART
    loaded.load({})
    assert loaded.present == {1: BEGIN, 3: BEGIN}, "as in a return to what was before"
    assert places.owners.map == BEGIN
    assert len(moved) == 1, "values are read, and do not move"


@pytest.mark.parametrize("owners", [[0, 1, 2, 3], [0, 0, 0, 0], [3, 2, 1, 0]])
def test_owners_of_another_number_of_ranks_are_left_out(owners: list[int]) -> None:
    loaded, places = of_two_layers()
    loaded.load({"1": owners})
    assert loaded.present == {1: BEGIN, 3: BEGIN}
    assert places.owners.map == BEGIN


def test_the_pool_of_the_first_rank_counts() -> None:
    """What another one has read is nothing to it; an error of the first is one of all."""
    told = '{"1": [[{"owners": [0, 1, 0, 1], "replicas": [[], []], "slots": 0}], 2.5]}'
    mesh: Any = SimpleNamespace(rank=1, agree=lambda error: error, share=lambda text: told)
    assert migration._shared(cast(Any, None), cast(Any, None), mesh) == {
        1: OwnerChoice([APART], 2.5)
    }
    mesh.agree = lambda error: "experts.rebalance_pool=x: No such file"
    with pytest.raises(migration.ConfigError, match=r"^experts.rebalance_pool=x: No such file$"):
        migration._shared(cast(Any, None), cast(Any, None), mesh)
