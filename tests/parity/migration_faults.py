"""Faults of experts that change owners, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.optim.moe import migration
from megapipe.optim.state_store import MASTER
from megapipe.testing import World
from tests.parity.cases import Case
from tests.parity.faults import Patch
from tests.parity.moved_experts import run_moving
from tests.parity.outcome import Outcome

CASE = Case(dp=2, ep=2, moe="top 2", layers=2, steps=3)


def _without(kept: Callable[[str], bool]) -> Patch:
    move = migration._move_kind

    def wrong(kind: str, *rest: Any) -> None:
        if not kept(kind):
            move(kind, *rest)

    return mock.patch.object(migration, "_move_kind", wrong)


def states_left_behind() -> Patch:
    return _without(lambda kind: kind != MASTER)


def masters_left_behind() -> Patch:
    return _without(lambda kind: kind == MASTER)


def rows_go_to_the_owners_before() -> Patch:
    take = ExpertReplicas.set_map

    def wrong(self: ExpertReplicas, after: ExpertMap) -> None:
        before = self._slot_of_expert
        take(self, after)
        self._slot_of_expert = before

    return mock.patch.object(ExpertReplicas, "set_map", wrong)


def owners_that_parameters_are_not_told() -> Patch:
    take = ExpertReplicas.set_map

    def wrong(self: ExpertReplicas, after: ExpertMap) -> None:
        before = self.owners.map
        take(self, after)
        self.owners.map = before

    return mock.patch.object(ExpertReplicas, "set_map", wrong)


def values_that_stay_where_a_rank_had_others() -> Patch:
    """Move values between ranks, but not between slots of a rank."""
    ways = migration.expert_moves

    def wrong(*given: Any) -> list[migration.ExpertMove]:
        return [way for way in ways(*given) if way.giver != way.taker]

    return mock.patch.object(migration, "expert_moves", wrong)


FAULTS = (
    states_left_behind,
    masters_left_behind,
    rows_go_to_the_owners_before,
    owners_that_parameters_are_not_told,
    values_that_stay_where_a_rank_had_others,
)


def run_faults(world: World) -> dict[str, Outcome]:
    found = {}
    for fault in FAULTS:
        with fault():
            found[fault.__name__] = run_moving(world, CASE)
    return found
