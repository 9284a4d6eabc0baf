"""Experts that change their owners: all that is theirs goes with them, and training goes on as if
nothing had moved."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megapipe import TrainStep
from megapipe.checkpoint.reader import Checkpoint
from megapipe.optim.moe.migration import move_experts
from megapipe.plan.moe.migration_traffic import migration_traffic
from megapipe.testing import World, run_world
from megapipe.train.resume.load import load
from tests.parity import reference
from tests.parity.collective_recorder import recording
from tests.parity.forced_routing import chosen
from tests.parity.migration_faults import CASE, FAULTS, run_faults
from tests.parity.moved_experts import begun, by_draw, layers_of, run_moving, with_policy
from tests.parity.outcome import Outcome, Parts, assemble, local_copies, own_values
from tests.parity.random_owners import drawn_map
from tests.parity.ranks import Case, Rows, check_case, configure, run_case
from tests.parity.tiers import in_parts, selected

SEEDS = (1, 2, 0)
"""Seeds of the maps that are taken over in turn; in the end experts are as at first."""
BASE = Case(dp=4, ep=2, moe="top 2", layers=2)
MOVED = [
    *(replace(BASE, zero=zero) for zero in (0, 1, 2, 3)),
    replace(BASE, dp=2, tp=2, sequence_parallel=True, etp=2, moe="pyramid, biased", layers=3),
    replace(BASE, ep=4, dtype="bf16", state_dtype="bf16", offload="host", rule="muon"),
    replace(BASE, dp=2, pp=2, schedule="chimera", layers=4),
]
"""Cases of replicated experts, shards of all kinds, parts of experts, narrow values elsewhere,
several holders."""


class Seen(NamedTuple):
    """What a rank has at one moment."""

    values: dict[str, Parts]
    copies: Parts


def seen(step: TrainStep) -> Seen:
    step.optimizer.await_all_weights()
    return Seen(own_values(step.optimizer), list(local_copies(step)))


def moved(world: World, cases: Sequence[Case]) -> list[list[Seen]]:
    found = []
    for case in cases:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        step.train(0, Rows(case), settle=True)
        found.append([seen(step)])
        for seed in SEEDS:
            after = {
                layer.ownership: drawn_map(layer.ownership.map, seed * (1 + layer.layer))
                for layer in layers_of(step)
            }
            move_experts(step.optimizer, after)
            for owners, present in after.items():
                owners.map = present
            found[-1].append(seen(step))
    return found


def whole_values(case: Case, ranks: Sequence[Seen]) -> dict[str, dict[str, Any]]:
    """Join master weights and states of all ranks, and the weights that they compute with."""
    config, _ = configure(case)
    like = {n: torch.empty(shape) for n, shape in reference.shapes(config.model).items()}
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank.values)
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        parts = [rank.values.get(kind, []) for rank in ranks]
        found[kind] = {name: values.numpy() for name, values in assemble(parts, like).items()}
    copies = found["copies"] = {n: np.full(each.shape, np.nan) for n, each in like.items()}
    for name, region, values in (copy for rank in ranks for copy in rank.copies):
        if name in copies:
            here = copies[name][region.inside(region._replace(offsets=(0,) * values.ndim))]
            assert np.all(np.isnan(here) | (here == values)), f"{name}: copies differ"
            here[...] = values
    return found


def assert_same_values(
    found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 2, "there are states"
    for kind, values in expected.items():
        for name, value in values.items():
            assert np.array_equal(found[kind][name], value, equal_nan=True), f"{kind} of {name}"


@pytest.fixture(scope="module")
def moments(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Return what all ranks had in each case, moment by moment."""
    cases = [*selected(request, "case", dict.fromkeys(MOVED))]
    ranks = run_world(4, moved, cases)
    return {
        case.name: list(zip(*(runs[i] for runs in ranks), strict=True))
        for i, case in enumerate(cases)
    }


@in_parts("case", MOVED, full=3, ids=lambda case: case.name)
def test_all_goes_with_an_expert_and_nothing_else(
    case: Case, moments: dict[str, list[Any]]
) -> None:
    first, *others = (whole_values(case, ranks) for ranks in moments[case.name])
    for other in others:
        assert_same_values(other, first)


TRAINED = [
    replace(BASE, zero=2, dispatch="all_gather", moe="pyramid, biased", layers=3, steps=3),
    replace(BASE, dp=2, tp=2, sequence_parallel=True, etp=2, moe="shared, gated", steps=3),
    replace(
        BASE, dp=2, pp=2, schedule="zb_h1", moe="groups", expert_chunks=2, m=3, layers=4, steps=3
    ),
    replace(BASE, cp=2, dp=2, zero=3, rule="lamb", masked=0.3, activations="full", steps=3),
]


@in_parts("case", TRAINED, full=4, ids=lambda case: case.name)
def test_experts_that_move_after_each_step_are_trained_as_others(case: Case) -> None:
    check_case(case, run_world(4, run_moving, case))


@pytest.fixture(scope="module")
def faulty() -> list[dict[str, Outcome]]:
    return run_world(CASE.world, run_faults)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, faulty: list[dict[str, Outcome]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|two ranks own it|is not zero"):
        check_case(CASE, [outcomes[fault.__name__] for outcomes in faulty])


BITWISE = [
    replace(BASE, zero=zero, clip=None, model="llama", dtype=dtype, steps=4)
    for zero, dtype in ((2, "bf16"), (0, "fp64"), (1, "fp32"))
]
"""Cases whose experts have a multiple of 16 values in each parameter."""


def moved_and_not(world: World, case: Case) -> tuple[Outcome, Outcome]:
    """Train with experts that move every second step, and with ones that stay."""
    return run_moving(world, case, every=2), run_case(world, case)


@in_parts("case", BITWISE, full=3, ids=lambda case: case.name)
def test_the_trajectory_is_the_same_to_the_bit_whoever_owns_experts(case: Case) -> None:
    """Cases do not clip: the norm would be summed in the order of the experts' slots."""
    others, plain = zip(*run_world(4, moved_and_not, case), strict=True)
    for a, b in zip(others, plain, strict=True):
        assert a.losses == b.losses
        assert a.routing == b.routing
    for step in range(case.steps):
        found, expected = (
            whole_values(case, [Seen(o.values[step + 1], o.copies[step]) for o in each])
            for each in (others, plain)
        )
        assert_same_values(found, expected)


LAYOUTS = [
    BASE,
    replace(BASE, ep=4, zero=2),
    replace(BASE, dp=2, tp=2, sequence_parallel=True, etp=2, zero=0),
    replace(BASE, dp=2, pp=2),
    replace(BASE, cp=2, dp=2, ep=1, zero=3),
]
"""Cases; in all but the last experts move."""
SAVED = 2
"""Number of steps before a save."""


def skewed(world: World) -> tuple[list[tuple[int, ...]], list[float]]:
    """Train with all tokens on two experts; one rank has both of them, but the pool has them on
    two."""
    case = replace(CASE, steps=2)
    with tempfile.TemporaryDirectory() as folder, chosen([[1, 0]]):
        config, layout = with_policy(case, folder, owners=[0, 1, 0, 1])
        step = TrainStep(config, layout, world.mesh(case.grid))
        losses = [step.train(i, Rows(case))[0].loss for i in range(case.steps)]
        return Kept.of(step).owners, losses


@pytest.mark.full
def test_a_skewed_run_takes_the_owners_of_its_pool() -> None:
    first, second = run_world(2, skewed)
    assert first == second
    assert first[0] == [(0, 1, 0, 1)] * 2


TOLD = [
    replace(BASE, zero=0),
    replace(BASE, zero=2, rule="sgd"),
    replace(BASE, ep=4, zero=1, dtype="bf16", state_dtype="bf16"),
    replace(BASE, dp=2, tp=2, sequence_parallel=True, etp=2, zero=3, layers=3),
]
"""Cases of replicated experts, shards of them, experts that are nowhere else, and parts of
experts."""


Told = Counter[tuple[str, str]]
"""Numbers of calls, or of bytes, by axis and kind of collective."""


def told(world: World, cases: Sequence[Case]) -> list[tuple[Told, Told]]:
    """Return the calls and bytes by which all experts change their owners."""
    found = []
    for case in cases:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        step.optimizer.await_all_weights()
        after = {}
        for layer in layers_of(step):
            present = layer.ownership.map
            owners = tuple((rank + 1) % case.ep for rank in present.owners)
            after[layer.ownership] = replace(present, owners=owners)
        with recording() as recorder:
            move_experts(step.optimizer, after)
        step.optimizer.await_all_weights()
        calls, sizes = Told(), Told()
        for call in recorder.calls:
            key = "ep" if call.ranks == step.mesh.ep.ranks else "edp", call.name
            calls[key] += 1
            sizes[key] += call.bytes
        found.append((calls, sizes))
    return found


@pytest.mark.full
def test_bytes_of_experts_that_move_are_those_of_the_plan(tmp_path: Path) -> None:
    """Where all of them do; of the rank that sends most."""
    ranks = run_world(4, told, TOLD)
    for i, case in enumerate(TOLD):
        config, layout = with_policy(case, str(tmp_path))
        calls, sizes = Told(), Told()
        for exchange in migration_traffic(config, layout, 0):
            calls[exchange.axis, exchange.collective] += exchange.count
            sizes[exchange.axis, exchange.collective] += exchange.bytes
        assert ("ep", "all_to_all") in sizes
        assert all(of_rank[i][0] == calls for of_rank in ranks), case.name
        found = [of_rank[i][1] for of_rank in ranks]
        assert all(each <= sizes for each in found), f"{case.name}: some have padding"
        assert sizes in found, case.name
    config, layout = configure(BASE)
    assert migration_traffic(config, layout, 0) == [], "without a policy none moves"


class Kept(NamedTuple):
    """What a rank has, and by layer the owners of its experts."""

    seen: Seen
    owners: list[tuple[int, ...]]

    @classmethod
    def of(cls, step: TrainStep) -> Kept:
        return cls(seen(step), [layer.ownership.map.owners for layer in layers_of(step)])


def pairs(world: World, cases: Sequence[Case]) -> tuple[list[Kept], list[list[Kept]]]:
    """Return what each layout saves, and what each loads from all that was saved."""
    saved, loaded = [], []
    with tempfile.TemporaryDirectory() as folder:
        shared = shared_folder(world, folder)
        for i, case in enumerate(cases):
            step = begun(world.mesh(case.grid), case, folder)
            with by_draw(10 * i + 1):
                for number in range(SAVED):
                    step.train(number, Rows(case), settle=True)
            step.save(shared / str(i), SAVED)
            saved.append(Kept.of(step))
        for case in cases:
            step, found = begun(world.mesh(case.grid), case, folder), []
            for i in range(len(cases)):
                step.load(shared / str(i))
                found.append(Kept.of(step))
            loaded.append(found)
        torch.distributed.barrier()
    return saved, loaded


def shared_folder(world: World, folder: str) -> Path:
    """Return the folder of the first rank."""
    world.restart()
    names = [folder]
    torch.distributed.broadcast_object_list(names)
    return Path(names[0])


@pytest.mark.slow
def test_what_was_saved_with_experts_anywhere_is_loaded_bitwise_in_every_layout() -> None:
    ranks = run_world(4, pairs, LAYOUTS)
    for i, case in enumerate(LAYOUTS):
        saved = [of_rank[i] for of_rank, _ in ranks]
        expected = whole_values(case, [each.seen for each in saved])
        moved = any(own != tuple(sorted(own)) for each in saved for own in each.owners)
        assert moved == (case.ep > 1)
        for j, other in enumerate(LAYOUTS):
            loaded = [of_rank[j][i] for _, of_rank in ranks]
            assert_same_values(whole_values(other, [each.seen for each in loaded]), expected)
            if i == j:
                assert [each.owners for each in loaded] == [each.owners for each in saved]


class OneNode:
    """Copies in memory of a node that has what its rank needs, and no other file."""

    def __init__(self, saved: Path, own: Path) -> None:
        self.checkpoint = Checkpoint.open(shutil.copytree(saved, own))
        self._own = own

    def fetch(self, checkpoint: Checkpoint, needed: set[str]) -> None:
        for path in self._own.glob("*.safetensors"):
            if path.name not in needed:
                path.unlink()

    def release(self) -> None:
        """Do nothing: nothing was fetched."""


def stopped(world: World, case: Case) -> list[tuple[list[float], Kept]]:
    """Train in one go, again after a return to what was saved on the way, and in another
    process."""

    def trained(step: TrainStep, start: int) -> tuple[list[float], Kept]:
        layers = len(list(layers_of(step)))
        with by_draw(1 + start * layers):
            results = [step.train(i, Rows(case), settle=True) for i in range(start, case.steps)]
        return [number for (r,) in results for number in (r.loss, r.grad_norm)], Kept.of(step)

    with tempfile.TemporaryDirectory() as folder:
        shared = shared_folder(world, folder)
        first = begun(world.mesh(case.grid), case, folder)
        with by_draw():
            for i in range(SAVED):
                first.train(i, Rows(case), settle=True)
        place = first.save(shared, SAVED)
        runs = [trained(first, SAVED)]
        first.load(shared)
        runs.append(trained(first, SAVED))
        second = begun(world.mesh(case.grid), case, folder)
        memory: Any = OneNode(Path(str(place)), Path(folder, "own"))
        load(memory.checkpoint, second.state, second.mesh, memory)
        runs.append(trained(second, SAVED))
        torch.distributed.barrier()
    return runs


@pytest.mark.full
def test_a_run_goes_on_bitwise_with_the_owners_that_it_had() -> None:
    """Also with a norm, by which is clipped: it is summed in the same order."""
    case = replace(BASE, steps=4, moe="step")
    once, *others = zip(*run_world(4, stopped, case), strict=True)
    expected = whole_values(case, [kept.seen for _, kept in once])
    for other in others:
        assert [numbers for numbers, _ in other] == [numbers for numbers, _ in once]
        assert [kept.owners for _, kept in other] == [kept.owners for _, kept in once]
        assert_same_values(whole_values(case, [kept.seen for _, kept in other]), expected)
