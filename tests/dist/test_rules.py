"""Update rules over slices and tensor-parallel parts give what they give on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.checkpoint.regions import whole
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import ParamRange
from megapipe.optim.rules import Rule, layerwise, muon
from megapipe.optim.rules.full_matrices import apply_to_full_matrices, gather_local
from megapipe.testing import World, run_world
from tests.parity.optim_rules import (
    PLAIN,
    Part,
    assemble,
    error,
    expected,
    is_hidden,
    run_rule,
    take_region,
)
from tests.parity.ranks import LR, STEPS, Case, Rows, configure, local_copies, plain
from tests.parity.tiers import in_parts

TOLERANCE = 1e-12


def all_rules(world: World, grid: Grid) -> dict[tuple[str, str], Part]:
    mesh = world.mesh(grid)
    runs = [(name, "fp64") for name in PLAIN] + [("muon", "fp32")]
    return {run: run_rule(run[0], mesh.dp, mesh.tp, dtype=run[1]) for run in runs}


@in_parts(
    "grid",
    [Grid(dp=4), Grid(dp=2, tp=2), Grid(tp=4), Grid(dp=3)],
    default=[Grid(dp=2, tp=2)],
    full=[Grid(tp=4)],
    ids=str,
)
def test_sharded_rules_are_the_plain_ones(grid: Grid) -> None:
    ranks = run_world(grid.world, all_rules, grid)
    for name in PLAIN:
        parts = [rank[name, "fp64"] for rank in ranks]
        assert error(assemble(parts), expected(name)) < TOLERANCE, name
        for a, b in ((a, b) for a in parts for b in parts if a.start == b.start):
            for (spec, start, stop), (other, _, _) in zip(a.entries, b.entries, strict=True):
                if spec.split_dim is None and spec == other:
                    here = slice(max(0, start - a.start), max(0, stop - a.start))
                    assert (a.master[here] == b.master[here]).all(), f"{name}: tp copies differ"
    narrow = assemble([rank["muon", "fp32"] for rank in ranks])
    alone = assemble([run_rule("muon", Axis.alone(), Axis.alone(), dtype="fp32")])
    for name in filter(is_hidden, narrow):
        assert narrow[name].equal(alone[name]), f"{name}: Newton-Schulz saw another matrix"
    if grid.dp > 1:
        cuts = {part.start for part in parts} - {0}
        hidden = [e for e in parts[0].entries if is_hidden(e[0].name)]
        assert any(a < cut < b for cut in cuts for _, a, b in hidden), "a slice ends in a matrix"


SHAPES = [(4, 6), (2, 8, 3), (12, 4)]
SPLIT = [0, 1, 1]


def spec_of_part(i: int, tp: Axis) -> LocalParameter:
    sizes, offsets = list(SHAPES[i]), [0] * len(SHAPES[i])
    sizes[SPLIT[i]] //= tp.size
    offsets[SPLIT[i]] = sizes[SPLIT[i]] * tp.index
    return LocalParameter(
        name=str(i),
        shape=SHAPES[i],
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        role="matrix",
        split_dim=SPLIT[i],
        decay=True,
    )


def bring_together(world: World) -> None:
    """Also where there are fewer matrices than ranks, or none in a rank's slice."""
    tp = world.mesh(Grid(tp=4)).tp
    matrices = [torch.arange(math.prod(s), dtype=torch.float64).view(s) for s in SHAPES]
    for count in range(len(SHAPES) + 1):
        specs = [spec_of_part(i, tp) for i in range(count)]
        regions = [take_region(m, spec) for m, spec in zip(matrices, specs, strict=False)]
        found = apply_to_full_matrices(regions, specs, tp, lambda m, _: m * m.max() + m.sum())
        assert len(found) == count
        for region, spec, m in zip(found, specs, matrices, strict=False):
            assert region.equal(take_region(m * m.max() + m.sum(), spec))

    alone = [spec_of_part(i, Axis.alone()) for i in range(3)]
    entries = [
        ParamRange(alone[0], 1, 25),
        ParamRange(alone[1], 25, 73),
        ParamRange(alone[2], 80, 128),
    ]
    bucket = torch.arange(200, dtype=torch.float64)
    mine = bucket[50 * tp.index : 50 * (tp.index + 1)]
    own, regions = gather_local(mine, entries, tp)
    assert own == [entries[:2], entries[1:], entries[2:], []][tp.index]
    for region, entry in zip(regions, own, strict=True):
        assert region.equal(bucket[entry.start : entry.stop].view(entry.spec.sizes))


def test_whole_matrices_are_brought_together_where_they_are_needed() -> None:
    run_world(4, bring_together)


def local_norms(rule: Rule) -> Any:
    """Take norms of what this rank has, as if it were all."""
    return mock.patch.object(layerwise, "all_reduce", lambda tensor, axis: tensor)


def norms_not_over_tp(rule: Rule) -> Any:
    return mock.patch.object(layerwise, "all_gather", lambda tensor, axis: tensor)


def half_matrices(rule: Rule) -> Any:
    """Run Newton-Schulz on tp parts."""

    def on_parts(regions: Any, specs: Any, tp: Any, function: Any) -> Any:
        return [function(*each) for each in zip(regions, specs, strict=True)]

    return mock.patch.object(muon, "apply_to_full_matrices", on_parts)


def slices_as_matrices(rule: Rule) -> Any:
    """Run Newton-Schulz on a matrix that is zero outside of this rank's shard."""

    def alone(values: Tensor, entries: Any, axis: Axis) -> Any:
        n = len(values)
        everything = values.new_zeros(n * axis.size)
        everything[n * axis.index : n * (axis.index + 1)] = values
        own = [e for e in entries if e.start < n * (axis.index + 1) and e.stop > n * axis.index]
        return own, [everything[e.start : e.stop].view(e.spec.sizes) for e in own]

    return mock.patch.object(muon, "gather_local", alone)


FAULTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("lamb", local_norms),
    ("lars", local_norms),
    ("lamb", norms_not_over_tp),
    ("lars", norms_not_over_tp),
    ("muon", half_matrices),
    ("muon", slices_as_matrices),
]


def faulty(world: World, grid: Grid) -> list[Part]:
    mesh = world.mesh(grid)
    found = []
    for name, fault in FAULTS:
        active: list[Any] = []

        def spoil(rule: Rule, fault: Any = fault, active: list[Any] = active) -> None:
            active.append(fault(rule))
            active[0].start()

        found.append(run_rule(name, mesh.dp, mesh.tp, spoil=spoil))
        active[0].stop()
    return found


def test_faults_are_noticed() -> None:
    ranks = run_world(4, faulty, Grid(dp=2, tp=2))
    for i, (name, fault) in enumerate(FAULTS):
        wrong = error(assemble([rank[i] for rank in ranks]), expected(name))
        assert wrong > 1e6 * TOLERANCE, f"{name} with {fault.__name__} passes: {wrong}"


SHARED = Case(model="llama", tp=2, pp=2, m=4, schedule="chimera")
"""Every stage has two holders, who update it together. No biases: a key bias has no true gradient,
and Lion would take the sign of its rounding."""
RULES: dict[str, dict[str, Any]] = {
    "lion": {},
    "rmsprop": {},
    "nadamw": {},
    "adabelief": {},
    "adam3": {},
    "lars": {"options": {"trust_coefficient": 0.1}},
    "lamb": {},
    "muon": {},
}


def train(world: World, case: Case) -> dict[str, Any]:
    """Return this rank's weights after a few steps, by rule."""
    config, layout = configure(case)
    mesh = world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp))
    copies = {}
    for rule, settings in RULES.items():
        changed = {"rule": rule, "weight_decay": 0.3, **settings}
        optimizer = config.optimizer.model_copy(update=changed)
        step = TrainStep(config.model_copy(update={"optimizer": optimizer}), layout, mesh)
        for i in range(STEPS):
            step.train(i, Rows(case))
        copies[rule] = list(local_copies(step))
    return copies


@pytest.mark.full
def test_stages_with_several_holders_train_by_any_rule_as_in_one_process() -> None:
    (alone,) = run_world(1, train, plain(SHARED))
    for copies in run_world(4, train, SHARED):
        for rule in RULES:
            reference = {name: values for name, _, values in alone[rule]}
            for name, region, values in copies[rule]:
                wanted = reference[name][region.inside(whole(reference[name].shape))]
                difference = abs(values - wanted).max() / max(abs(wanted).max(), LR)
                assert difference < 1e-10, f"{rule}: {name} {region}"
