"""The search for the fastest layout (megapipe plan) against the plans of all layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megapipe.cli import parse
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.cache import Cache
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand
from megapipe.plan.search.command import main
from megapipe.plan.search.estimate import Estimate, ShapeCost, estimate
from megapipe.plan.search.layouts import VARIED
from megapipe.plan.search.pipelines import pipeline_of
from megapipe.plan.search.search import Progress, Search, split_words
from megapipe.plan.step_time import expected_step, simulate_step
from megapipe.plan.units import Units
from megapipe.schedule.render.scene import INK
from tests.parity.searches import search_of
from tests.parity.tiers import in_parts

SMALL = (
    *("model.layers=6", "model.hidden=256", "model.heads=4", "model.kv_heads=2"),
    *("model.vocab_size=1000", "model.dtype=bf16", "model.tied_embeddings=false"),
    *("train.sequence_length=512", "train.global_batch=8", "plan.device=H100"),
    *("parallel.ranks_per_node=4", "parallel.device=cuda"),
)
EXPERTS = (*SMALL, "model.moe.num_experts=4", "model.moe.expert_ffn_hidden=128")
KEEP = {"activations.policy": "keep", "train.microbatch": "1"}
FEW = {**KEEP, "parallel.pp": "2", "parallel.tp": "1"}
CASES: dict[str, tuple[Sequence[str], Mapping[str, str], int]] = {
    "all fit": (SMALL, KEEP, 4),
    "some do not fit": (
        (*SMALL, "plan.device_gb=1.27"),
        {"parallel.tp": "1", "train.microbatch": "2"},
        4,
    ),
    "every schedule": (
        (*SMALL, "model.layers=8"),
        {**KEEP, "parallel.pp": "4", "parallel.tp": "1"},
        4,
    ),
    "sharded weights": (
        (*SMALL, "model.layers=8"),
        {"activations.policy": "keep", "parallel.pp": "1", "optimizer.zero": "3"},
        4,
    ),
    "a schedule with slices": (
        (*SMALL, "pipeline.schedule=seq1f1b"),
        {**KEEP, "parallel.pp": "4"},
        4,
    ),
    "experts": (EXPERTS, {**KEEP, "parallel.tp": "1"}, 4),
    "post-validation, kernels that wait for the host": (
        (*SMALL, "optimizer.post_validation=true", "model.vocab_size=64000"),
        {**KEEP, "parallel.tp": "1", "parallel.pp": "4"},
        4,
    ),
    "first layers dense": (
        (*EXPERTS, "model.moe.first_dense_layers=3"),
        {**KEEP, "parallel.tp": "1"},
        4,
    ),
    "a slow link and a slow device": (
        (*SMALL, "plan.links.1-2=0.1", "plan.rank_speeds=[1,0.5,1,1]", "plan.factors.bytes=1.5"),
        {**KEEP, "parallel.tp": "1"},
        4,
    ),
}


FEW_SCHEDULES = {"1f1b": (None,), "interleaved_1f1b": (2, 3), "zb_v": (2,), "zb_h1": (None,)}
"""Schedules of most tests, which then take a third of the time."""
BOUNDED = ("all fit", "some do not fit")
"""Cases whose kernels take long enough for bounds that help."""


def brute_force(search: Search) -> list[Estimate]:
    """Plan every layout; return those that fit, the fastest first, and check their bounds."""
    room = search.speeds.plannable_bytes
    found = []
    for choice in search.choices():
        try:
            units = search.planner.units(choice)
        except MegapipeError:
            continue
        planned = estimate(choice, units, search.speeds)
        cost = search.planner.measure(choice.shape)
        assert isinstance(cost, ShapeCost)
        count = search.config.train.global_batch // (choice.dp * choice.shape.microbatch)
        pipeline = pipeline_of(search.config, choice, count)
        assert cost.least_bytes(choice, count, pipeline) <= planned.bytes, choice
        assert cost.least_seconds(choice, count, pipeline) <= planned.seconds, choice
        assert cost.simulated_seconds(units.layout) <= planned.seconds, choice
        if room is None or planned.bytes <= room:
            found.append(planned)
    return sorted(found, key=lambda each: each.seconds)


@in_parts("case", CASES, default=3)
def test_the_first_ten_are_those_of_all_plans(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, fixed, gpus = CASES[case]
    if case == "every schedule":
        monkeypatch.undo()
    search = search_of(words, fixed, gpus, Cache([tmp_path]))
    every = brute_force(search)
    found = search.run(10)
    assert found.complete
    assert [each.seconds for each in found.best] == [each.seconds for each in every[:10]]
    assert len(found.planned) < len(every) or case not in BOUNDED, "bounds help"
    assert (found.left_out > 0) == (case in ("some do not fit", "every schedule"))
    again = search_of(words, fixed, gpus, Cache([tmp_path])).run(1, with_front=True)
    assert [(each.seconds, each.bytes) for each in again.front] == [
        each
        for each in sorted({(each.seconds, each.bytes) for each in every})
        if not any(o.seconds <= each[0] and o.bytes < each[1] for o in every)
        and not any(o.seconds < each[0] and o.bytes == each[1] for o in every)
    ]
    assert len(again.planned) >= len(found.planned)


def test_another_device_is_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in SMALL if not word.startswith("plan.device")]
    seconds = []
    for name in ("H100", "A100-SXM4-80GB"):
        monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda name=name: name)
        found = search_of(words, {**FEW, "parallel.cp": "1"}, 4, Cache([tmp_path])).run(1)
        seconds.append(found.best[0].seconds)
    assert seconds[1] > seconds[0]


def test_an_interrupted_search_returns_what_it_has(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.best is not None:
            raise KeyboardInterrupt

    found = search_of(SMALL, FEW, 4, Cache([tmp_path])).run(10, interrupt)
    assert not found.complete
    assert len(found.best) == len(found.planned) == 1


def test_words_fix_keys_that_are_searched() -> None:
    words = ["llama_8b", "parallel.tp=2", "pipeline.schedule=zb_v", "train.microbatch=auto"]
    kept, free = split_words([*words, "train.steps=3"])
    assert kept == [
        *("llama_8b", "parallel.tp=2", "train.steps=3"),
        *("pipeline=unset", "activations=unset", "pipeline.schedule=zb_v"),
    ]
    assert free == {*VARIED} - {"parallel.tp", "pipeline.schedule"}


@pytest.fixture(autouse=True)
def _few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.plan.search.layouts.SCHEDULES", FEW_SCHEDULES)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_command_prints_and_writes_the_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is a configuration whose plan has the time and the memory that the table shows."""
    fixed = [f"{key}={value}" for key, value in FEW.items()]
    argv = [*SMALL, *fixed, "--gpus", "4", "--top", "2"]
    path = tmp_path / "best.yaml"
    assert main([*argv, "--json", "-o", str(path)]) == 0
    best, second = json.loads(capsys.readouterr().out)
    assert best["seconds"] <= second["seconds"]
    assert best["keys"].items() >= {"parallel.pp": 2, "activations.policy": "keep"}.items()
    assert main(argv) == 0
    heading, row, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(heading.split()[2:], row.split()[1:], strict=False))
    assert f"{best['seconds']:.4g}" in cells.values()
    config, layout = resolve(parse([str(path)]).config, None, None, measure=BY_UNITS)
    assert (layout.pp, layout.world) == (2, 4)
    units, speeds = Units(config, layout), Speeds.of(config)
    planned = expected_step(units, speeds, simulate_step(units, speeds))
    assert planned.step == best["seconds"]
    assert demand(units).most.total == best["bytes"]


def test_the_front_as_a_table_and_as_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = [f"{key}={value}" for key, value in FEW.items()]
    argv = [*SMALL, *fixed, "--gpus", "4", "--front", "--svg", str(tmp_path / "front.svg")]
    assert main([*argv, "--json"]) == 0
    front = json.loads(capsys.readouterr().out)
    assert len(front) > 1
    assert [each["seconds"] for each in front] == sorted(each["seconds"] for each in front)
    assert [each["bytes"] for each in front] == sorted(
        (each["bytes"] for each in front), reverse=True
    )
    drawing = ElementTree.parse(tmp_path / "front.svg").getroot()
    texts = ["".join(each.itertext()) for each in drawing.iter() if each.tag.endswith("text")]
    assert texts[0] == "layouts of run on 4 H100"
    assert "device, less its margin" in texts
    edges = [each for each in drawing.iter() if each.get("stroke") == INK and each.get("width")]
    assert len(edges) == len(front)
    dots = [(float(each.get("x", 0)) + 4, float(each.get("y", 0)) + 4) for each in edges]
    steps = [
        each.get("d") for each in drawing.iter() if each.get("stroke") == INK and each.get("d")
    ]
    assert len(steps) == len(front) - 1
    for step in steps:
        numbers = [float(number) for number in re.findall(r"[\d.]+", str(step))]
        first, corner, second = zip(numbers[::2], numbers[1::2], strict=True)
        assert first in dots
        assert second in dots
        assert corner == (first[0], second[1]), "no better than both"
    assert main([*argv[:-1], str(tmp_path / "none" / "front.svg")]) == 2
    assert "front.svg: there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*SMALL, "--gpus", "7"], "no layout of 7 devices"),
        ([*SMALL, "--gpus", "4", "model.layers=2"], "model.layers=2: expected at least 3"),
        ([*SMALL, "--gpus", "4", "model.source=a:b"], "model.source=a:b: a search does not know"),
        (
            [*SMALL, "--gpus", "4", "train.microbatch=3"],
            "has train.microbatch=3: expected another value, or none",
        ),
        (
            [*SMALL, "--gpus", "4", "pipeline.schedule=ZB-H1"],
            "schedule 'ZB-H1' is unknown; the known ones are",
        ),
        (
            [*SMALL, "--gpus", "4", "parallel.pp=4", "parallel.tp=2"],
            "no layout of 4 devices has parallel.tp=2 parallel.pp=4: expected other values",
        ),
        (
            [*SMALL, "--gpus", "4", "activations.offload=true"],
            "activations.offload=true: the search chooses these sections",
        ),
        ([*SMALL, "--gpus", "4", "-o", "none/x.yaml"], "none/x.yaml: there is no folder none"),
        (
            [*SMALL, "--gpus", "2", "parallel.etp=2", "train.microbatch=1", "parallel.pp=2"],
            "layouts can be run; for example: configuration: parallel.etp=2",
        ),
        ([*SMALL, "--gpus", "0"], "--gpus: expected N or N,N, at least 1"),
        ([*SMALL, "--gpus", "4", "--device", "H1000"], "plan.device=H1000 is not known"),
        ([*SMALL, "--gpus", "4", "plan.device=unset"], "the speed of the device is not known"),
        (
            [*SMALL, "--gpus", "4", "plan.device_gb=0.01", "train.microbatch=1", "parallel.pp=2"],
            "even their lower",
        ),
        (
            [*SMALL, "--gpus", "4", "plan.device_gb=0.3", "train.microbatch=1", "parallel.pp=2"],
            "the least memory is",
        ),
    ],
)
def test_bad_input(
    argv: Sequence[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
