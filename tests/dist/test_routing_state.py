"""What routers keep, and maps of experts: faults that parity notices, steps without an update or
computed twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from megapipe.train.update import Update
from tests.parity.faults import outcomes_of_faults
from tests.parity.in_memory_models import held_model
from tests.parity.ranks import Case, Rows, check_case, configure
from tests.parity.reference import init_random, logits, random_batch
from tests.parity.routing_state_faults import FAULTS
from tests.parity.tiers import in_parts, selected

STEPS, POISONED = 4, 1
CASE = Case(moe="step", layers=2, m=2, dtype="fp32", steps=STEPS)
LARGE = 2.0**20
"""A loss scale at which fp16 overflows; at half of it it does not."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=4, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|not what it was set to"):
        check_case(FAULTS[fault], outcomes[fault.__name__])


class Seen(NamedTuple):
    """What the layers of a rank have after a step."""

    skipped: bool
    kept: list[Tensor]
    """Biases and counts of the local layers after the step."""
    largest: float | None
    maps: list[ExpertMap]
    """Expert maps of the local layers after the step."""


def trained(world: World, case: Case, health: dict[str, Any], poisoned: bool) -> list[Seen]:
    """Train all steps; if `poisoned`, the gradients of one are not finite on the last rank. fp16
    begins at a loss scale that overflows."""
    settings = configure(case)[0].model_dump()
    settings["health"] |= health
    config, layout = resolve(Config.model_validate(settings), case.world, case.vocab)
    step = TrainStep(config, layout, world.mesh(case.grid))
    if case.dtype == "fp16":
        step.scaler.scale = LARGE
    finish, seen = step.optimizer.finish_reduce, []

    def poison(loss_scale: float = 1.0) -> Tensor:
        squares = finish(loss_scale)
        wrong = poisoned and len(seen) == POISONED and world.rank == world.size - 1
        return squares * math.nan if wrong else squares

    with mock.patch.object(step.optimizer, "finish_reduce", poison):
        for i in range(STEPS):
            (result,) = step.train(i, Rows(case))
            kept = [
                buffer.clone()
                for module in step.modules.values()
                for name, buffer in module.named_buffers()
                if name.endswith(("experts.bias", "experts.last"))
            ]
            layers = (each for module in step.modules.values() for each in module.modules())
            maps = [
                layer.replicas.map
                for layer in layers
                if isinstance(layer, RoutedExperts) and layer.replicas is not None
            ]
            bias = result.figures.get("max_bias")
            seen.append(Seen(result.skipped is not None, kept, bias, maps))
    return seen


def check(seen: list[Seen]) -> None:
    """Biases and counts move in the steps that have an update, and in no others."""
    before = [torch.full_like(each, not each.is_floating_point()) for each in seen[0].kept]
    for step in seen:
        moved = {not a.equal(b) for a, b in zip(step.kept, before, strict=True)}
        assert moved == {not step.skipped}, "something has moved without an update, or not with one"
        biases = [each for each in step.kept if each.is_floating_point()]
        assert step.largest == max(bias.abs().max().item() for bias in biases)
        before = step.kept


SKIPS = {
    "not finite": (CASE, {"non_finite": "skip", "replay": False}, True),
    "fp16": (replace(CASE, dtype="fp16", moe="step, first"), {}, False),
}


@pytest.mark.parametrize("kind", SKIPS)
def test_a_step_without_an_update_moves_nothing(kind: str) -> None:
    (seen,) = run_world(1, trained, *SKIPS[kind])
    assert 1 <= sum(step.skipped for step in seen) < STEPS
    check(seen)


def moved_where_it_is_skipped(world: World, *given: Any) -> list[Seen]:
    apply = Update.apply

    def wrong(self: Update, step: int, totals: Any, again: Any) -> Any:
        result = apply(self, step, totals, again)
        if result.skipped is not None:
            for each in self.followers:
                each.after_update(step, totals.routing)
        return result

    with mock.patch.object(Update, "apply", wrong):
        return trained(world, *given)


@pytest.mark.parametrize("kind", SKIPS)
def test_the_test_notices_what_moves_all_the_same(kind: str) -> None:
    (seen,) = run_world(1, moved_where_it_is_skipped, *SKIPS[kind])
    with pytest.raises(AssertionError, match="without an update"):
        check(seen)


COPIED = replace(CASE, dp=2, ep=2, m=1, placement="changing")
PLACED = {
    "copies, not finite": (COPIED, {"non_finite": "skip", "replay": False}, True),
    "copies, fp16": (replace(COPIED, dtype="fp16", moe="step, first"), {}, False),
    "owners, fp16": (replace(COPIED, dtype="fp16", moe="top 2", placement="migrating"), {}, False),
}


def trained_placed(world: World) -> dict[str, tuple[list[Seen], list[Seen]]]:
    """Train each case as it is, and with maps that are decided also where a step is skipped."""
    found = {}
    for kind, given in PLACED.items():
        right = trained(world, *given)
        with mock.patch.object(Update, "apply", decided_where_it_is_skipped(Update.apply)):
            found[kind] = right, trained(world, *given)
    return found


def decided_where_it_is_skipped(apply: Any) -> Any:
    def wrong(self: Update, step: int, totals: Any, again: Any) -> Any:
        result = apply(self, step, totals, again)
        if result.skipped is not None:
            for each in self.followers:
                if isinstance(each, ExpertRebalancer):
                    each.after_update(step, totals.routing)
        return result

    return wrong


def check_maps(seen: list[Seen]) -> None:
    """Maps change after steps that have an update, and after no others."""
    assert 1 <= sum(step.skipped for step in seen) < STEPS
    before = [ExpertMap.even(each.experts, each.ranks, each.slots) for each in seen[0].maps]
    changed = []
    for step in seen:
        assert not step.skipped or step.maps == before, "a map is another without an update"
        changed.append(step.maps != before)
        before = step.maps
    assert any(changed)


def test_a_step_without_an_update_leaves_copies_and_owners() -> None:
    """And where one does not, it is noticed."""
    for found in run_world(2, trained_placed):
        for right, wrong in found.values():
            check_maps(right)
            with pytest.raises(AssertionError, match="a map is another without an update"):
                check_maps(wrong)


def test_a_step_that_is_computed_again_moves_them_once() -> None:
    """Because it is due, or because its first result is not finite."""
    (once,) = run_world(1, trained, CASE, {}, False)
    (twice,) = run_world(1, trained, CASE, {"replay_every": 1}, False)
    check(once)
    for a, b in zip(once, twice, strict=True):
        assert all(map(torch.equal, a.kept, b.kept))


@pytest.mark.slow
def test_a_skipped_step_in_a_layout() -> None:
    """On ranks with experts of their own; all have the same biases."""
    case = replace(CASE, tp=2, ep=2, sequence_parallel=True)
    first, second = run_world(2, trained, case, {"non_finite": "skip", "replay": False}, True)
    check(first)
    assert [step.skipped for step in first] == [i == POISONED for i in range(STEPS)]
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a.kept, b.kept))


def test_a_model_that_is_used_has_its_biases() -> None:
    config = configure(Case(moe="groups", layers=2))[0].model
    config = config.model_copy(update={"vocab_size": 257})
    params = init_random(config, seed=3)
    tokens, *_ = random_batch(config, 2, 8, seed=1)
    model = held_model(config, params, context=8)
    found = model.logits(model.microbatch(tokens))
    assert found is not None
    wanted = logits(params, config, tokens)
    torch.testing.assert_close(found.transpose(0, 1), wanted, rtol=1e-10, atol=1e-12)
    biases = {name for name in params if name.endswith("router.bias")}
    unbiased = {n: p * 0 if n in biases else p for n, p in params.items()}
    assert not torch.allclose(logits(unbiased, config, tokens), wanted)
