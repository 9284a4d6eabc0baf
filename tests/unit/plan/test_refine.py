"""Layouts whose stages differ (megapipe plan --refine), against the plans of all combinations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.cache import Cache
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand, fits
from megapipe.plan.search.command import main
from megapipe.plan.search.estimate import Estimate, estimate
from megapipe.plan.search.layouts import POLICIES
from megapipe.plan.search.refine import Refiner
from megapipe.plan.search.search import Search
from megapipe.plan.step_time import expected_step, simulate_step
from megapipe.plan.units import Units
from tests.parity.searches import search_of

MODEL = (
    *("model.layers=6", "model.hidden=1024", "model.heads=8", "model.vocab_size=8000"),
    *("model.dtype=bf16", "model.tied_embeddings=false", "model.positions=rotary"),
    *("train.sequence_length=2048", "train.global_batch=8", "plan.device=H100"),
    *("parallel.ranks_per_node=4", "parallel.device=cuda"),
)
FIXED = {
    "parallel.dp": "1",
    "parallel.tp": "1",
    "parallel.pp": "2",
    "parallel.cp": "1",
    "train.microbatch": "1",
    "pipeline.schedule": "1f1b",
    "activations.policy": "full",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(
    search: Search, found: Estimate, changes: dict[str, Sequence[object]]
) -> Estimate | None:
    """Plan a layout with other values by stage; None if it does not fit."""
    choice = found.choice.with_stages(changes)
    try:
        units = search.planner.units(choice)
    except MegapipeError:
        return None
    if fits(demand(units).most.total, search.speeds) is False:
        return None
    return estimate(choice, units, search.speeds)


def test_stages_recompute_as_little_as_fits(tmp_path: Path) -> None:
    """The refined layout is the fastest of all policies by stage, and not a uniform one."""
    cache = Cache([tmp_path])
    wide = search_of(MODEL, FIXED, 2, cache)
    full = wide.run(1).best[0]
    keep = planned(wide, full, {"activations.policy": ["keep"] * 2})
    assert keep is not None
    room = (full.bytes + keep.bytes) / 2 / 1e9
    search = search_of([*MODEL, f"plan.device_gb={room}"], FIXED, 2, cache)
    found = search.run(1).best[0]
    every = [
        each
        for policies in product(POLICIES, repeat=2)
        if (each := planned(search, found, {"activations.policy": policies})) is not None
    ]
    seen = list[Estimate]()
    refiner = Refiner(search.planner, search.speeds, seen.append)
    refined = refiner._loosened(found)
    assert refined.seconds == min(each.seconds for each in every)
    assert refined.seconds < found.seconds
    assert len(set(dict(refined.choice.by_stage)["activations.policy"])) == 2
    assert refiner.refine(found).seconds <= refined.seconds
    assert all(fits(each.bytes, search.speeds) for each in seen)


def test_layers_leave_the_slowest_rank(tmp_path: Path) -> None:
    search = search_of(MODEL, {**FIXED, "activations.policy": "keep"}, 2, Cache([tmp_path]))
    found = search.run(1).best[0]
    skewed = planned(search, found, {"pipeline.stage_layout": [5, 1]})
    assert skewed is not None
    every = [planned(search, found, {"pipeline.stage_layout": [n, 6 - n]}) for n in range(1, 6)]
    best = min(each.seconds for each in every if each is not None)
    refined = Refiner(search.planner, search.speeds, lambda _: None).refine(skewed)
    assert refined.seconds == best < skewed.seconds
    alone = replace(found.choice, pp=1, dp=2)
    one = found._replace(choice=alone)
    assert Refiner(search.planner, search.speeds, lambda _: None).refine(one) is one


def test_the_command_writes_a_refined_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "best.yaml"
    given = [*MODEL, *(f"{key}={value}" for key, value in FIXED.items()), "--gpus", "2"]
    assert main([*given, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)[0]
    assert main([*given, "--refine", "--json", "-o", str(path)]) == 0
    after = json.loads(capsys.readouterr().out)[0]
    assert after["seconds"] < before["seconds"]
    assert after["keys"]["activations.policy"] == ["keep", "keep"]
    config, layout = resolve(parse([str(path)]).config, None, None, measure=BY_UNITS)
    units, speeds = Units(config, layout), Speeds.of(config)
    assert expected_step(units, speeds, simulate_step(units, speeds)).step == after["seconds"]
    assert main([*given, "--refine", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "keep x 2" in said
    assert "activations.policy=[keep,keep]" in said
    uniform = search_of(MODEL, FIXED, 2).run(1).best[0].choice
    other = uniform.with_stages({"pipeline.stage_layout": [2, 4]})
    assert other.difference(uniform) == "pipeline.stage_layout=[2,4]"
    assert uniform.difference(other) == "pipeline.stage_layout=unset"


def test_an_interrupt_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> Estimate:
        raise KeyboardInterrupt

    monkeypatch.setattr(Refiner, "refine", interrupt)
    given = [*MODEL, *(f"{key}={value}" for key, value in FIXED.items()), "--gpus", "2"]
    assert main([*given, "--refine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["keys"]["activations.policy"] == "full"
