"""The logic of benchmarks/planner.py: points as configurations, and figures of predictions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
ROW = {
    "id": "7",
    "source": "Somebody, 2601.00001",
    "model": "LLAMA",
    "layers": "8",
    "hidden": "1024",
    "heads": "8",
    "kv_heads": "8",
    "ffn": "4096",
    "vocab": "32000",
    "seq": "2048",
    "gpu": "H100",
    "gpus": "8",
    "precision": "bf16",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "ep": "",
    "dp": "2",
    "shard": "ZeRO-1",
    "mbs": "1",
    "gbs": "16",
    "recompute": "full",
    "schedule": "1F1B",
    "step_s": "2.0",
    "outcome": "ran",
    "notes": "",
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a file of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def points(load: Callable[[str], Any]) -> Any:
    return load("published.points")


@pytest.fixture
def assumptions(load: Callable[[str], Any]) -> Any:
    return load("published.assumptions")


@pytest.fixture
def figures(load: Callable[[str], Any]) -> Any:
    return load("published.figures")


def test_a_row_is_read_with_its_units(points: Any) -> None:
    point = points.Point.of(ROW)
    assert (point.step_s, point.memory, point.ran) == (2.0, None, True)
    assert (point.origin, point.is_own) == ("Somebody", False)
    faster = points.Point.of({**ROW, "step_s": "", "tok_s_gpu": "1024"})
    assert faster.step_s == 16 * 2048 / (1024 * 8)
    for notes, unit in (("", 1e9), ("GiB allocated", 2**30)):
        assert points.Point.of({**ROW, "mem_GB": "40", "notes": notes}).memory == 40 * unit
    assert not points.Point.of({**ROW, "outcome": "OOM"}).ran


def test_every_kept_row_can_be_read_and_is_priced_or_has_a_reason(
    points: Any, assumptions: Any
) -> None:
    own, published = (points.read_points([file]) for file in (points.OWN, points.PUBLISHED))
    assert len(published) == 292
    assert all(point.is_own for point in own)
    every = [*own, *published]
    assert len({point.id for point in every}) == len(every)
    for point in every:
        if assumptions.why_not_priced(point) is None:
            assert assumptions.configuration(point)["parallel.tp"] == point.tp
    assert all(assumptions.why_not_priced(point) is None for point in own)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"model.norm": "rmsnorm", "plan.inter_node_gb_s": 50, "parallel.ranks_per_node": 8}),
        ({"model": "GPT 2B", "gpu": "A100-80GB"}, {"plan.system": "megatron-2021"}),
        ({"model": "GPT 2B", "gpu": "A100-80GB"}, {"parallel.sequence_parallel": False}),
        ({"gpu": "GB200"}, {"parallel.ranks_per_node": 64}),
        ({"heads": ""}, {"model.heads": 64}),
        ({"vpp": "4", "schedule": "interleaved 1F1B"}, {"pipeline.chunks": 4}),
        ({"pp": "1", "dp": "4", "shard": "FSDP"}, {"optimizer.zero": 3, "pipeline.chunks": 8}),
        ({"source": "bigscience x"}, {"plan.inter_node_gb_s": 6.25}),
        ({"notes": "compile; GiB"}, {"kernels.compile": True}),
        ({"recompute": "norm, act"}, {"activations.modules": ["norm", "mlp_activation"]}),
        ({"model": "Qwen3_30B_a3B", "ep": "2"}, {"model.moe.top_k": 8, "parallel.ep": 2}),
    ],
)
def test_settings_of_a_row(
    points: Any, assumptions: Any, changes: dict[str, str], settings: dict[str, object]
) -> None:
    found = assumptions.configuration(points.Point.of({**ROW, **changes}))
    assert {key: found.get(key) for key in settings} == settings
    assert ("kernels.compile" in found) == ("compile" in changes.get("notes", ""))


@pytest.mark.parametrize(
    ("layers", "pp", "notes", "cut"),
    [
        ("8", "2", "", [4, 4]),
        ("14", "4", "", [3, 4, 4, 3]),
        ("8", "2", "first and last stage one layer less", [4, 4]),
        ("22", "8", "first and last stage one layer less", [2, 3, 3, 3, 3, 3, 3, 2]),
        ("7", "4", "", [2, 2, 2, 1]),
    ],
)
def test_stages_are_cut_as_sources_do(
    points: Any, assumptions: Any, layers: str, pp: str, notes: str, cut: list[int]
) -> None:
    point = points.Point.of({**ROW, "layers": layers, "pp": pp, "notes": notes})
    assert assumptions.configuration(point)["pipeline.stage_layout"] == cut


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precision": "FP8-CS"}, "fp8 recipe"),
        ({"model": "DeepSeekV3"}, "latent attention (MLA)"),
        ({"schedule": "1F1B, EP overlap"}, "schedule: 1F1B, EP overlap"),
        ({"layers": ""}, "sizes of the model not given"),
        ({"step_s": ""}, "neither step time nor memory given"),
        ({"step_s": "", "outcome": "OOM"}, None),
        ({"step_s": "", "mem_GB": "4"}, None),
        ({}, None),
    ],
)
def test_rows_are_left_out_for_a_reason(
    points: Any, assumptions: Any, changes: dict[str, str], why: str | None
) -> None:
    assert assumptions.why_not_priced(points.Point.of({**ROW, **changes})) == why


@pytest.fixture
def predict(points: Any, figures: Any) -> Callable[..., Any]:
    """Return a function that makes a prediction for the row, with changes."""

    def made(predicted: float, measured: float, layout: str = "", **changes: str) -> Any:
        point = points.Point.of({**ROW, "step_s": str(measured), **changes})
        settings = (layout or f"{predicted} {point.global_batch}",)
        return figures.Prediction(point, settings, predicted, 1e9, 2e9, 10e9)

    return made


def test_level_and_spread(figures: Any) -> None:
    level = figures.Level.of([0.5, 1.0, 1.0, 1.0, 2.0])
    assert level == (5, 1.0, 0.0, pytest.approx(0.5 + 0.6 * 0.5))
    assert figures.percentile([3.0], 0.9) == 3.0


def test_a_wrong_choice_has_a_regret(figures: Any, predict: Callable[..., Any]) -> None:
    """The layout that seems best takes 2.2 s, the best one 2 s; the third takes 4 s."""
    (own,) = figures.layout_sets([predict(1.0, 2.2), predict(1.1, 2.0), predict(3.0, 4.0)])
    assert own.regret == pytest.approx(0.1)
    assert own.regret_at_one_batch == pytest.approx(0.1)
    assert own.tau == pytest.approx(1 / 3)
    assert own.pairs == (2, 3)
    assert own.noise is None


def test_close_layouts_are_no_pair(figures: Any, predict: Callable[..., Any]) -> None:
    (own,) = figures.layout_sets([predict(2.0, 1.0), predict(1.0, 1.04), predict(3.0, 1.06)])
    assert own.pairs == (1, 1)


def test_time_is_per_sample(figures: Any, predict: Callable[..., Any]) -> None:
    rows = [predict(1.0, 2.0), predict(1.5, 3.0, gbs="32"), predict(3.0, 4.0)]
    (own,) = figures.layout_sets(rows)
    assert own.best.measured == 3.0 / 32
    assert (own.regret, own.regret_at_one_batch) == (0, 0)


def test_repeated_measurements_are_one_layout(figures: Any, predict: Callable[..., Any]) -> None:
    """Their median counts, their difference is the noise, and they are no pair."""
    repeated = [predict(1.0, seconds, "same") for seconds in (2.0, 2.1, 2.4)]
    assert figures.layout_sets([*repeated, predict(2.0, 3.0)]) == []
    (own,) = figures.layout_sets([*repeated, predict(2.0, 3.0), predict(3.0, 4.0)])
    assert len(own.choices) == 3
    assert own.best.measured == 2.1 / 16
    assert own.noise == pytest.approx(0.2)
    assert own.pairs == (3, 3)


def test_models_are_not_compared_with_each_other(figures: Any, predict: Callable[..., Any]) -> None:
    rows = [predict(float(i), 1.0) for i in range(1, 4)]
    for change in ({"heads": "16"}, {"gpus": "16"}, {"seq": "4096"}, {"source": "Another"}):
        others = [predict(float(i), 1.0, **change) for i in range(4, 6)]
        assert [len(own.choices) for own in figures.layout_sets([*rows, *others])] == [3]


def test_a_factor_of_the_other_half_corrects_a_level(
    figures: Any, predict: Callable[..., Any]
) -> None:
    """All rows of a device are half as long as measured, so its factor is 2."""
    rows = [predict(1.0, 2.0, model=f"M{i}") for i in range(6)]
    errors = figures.held_out(rows, lambda row: row.point.model)
    assert len(errors.middle) == figures.SPLITS
    assert max(errors.p90) == 0
    apart = [*rows, *(predict(1.0, 1.0, model=f"N{i}", gpu="A100") for i in range(6))]
    assert max(figures.held_out(apart, lambda row: row.point.model).p90) == 0
    alone = [*rows[:1], predict(1.0, 4.0, gpu="A100")]
    errors = figures.held_out(alone, lambda row: row.point.gpu)
    assert set(errors.middle) == {0.5, 0.75}, "a device without a row in the fitted half"


def test_groups_are_not_divided(figures: Any, predict: Callable[..., Any]) -> None:
    """The first model is priced at half of its time, the second at a third."""
    rows = [predict(1.0, 2.0, model="A")] * 4 + [predict(1.0, 3.0, model="B")] * 4
    errors = figures.held_out(rows, lambda row: row.point.model)
    assert {round(each, 6) for each in errors.middle} == {round(2 / 3 - 1, 6) * -1, 0.5}


def test_verdicts_on_memory(figures: Any, predict: Callable[..., Any]) -> None:
    rows = [
        replace(predict(1.0, 1.0, id=id, outcome=outcome), total=total)
        for id, outcome, total in (
            ("fits", "ran", 9e9),
            ("tight", "ran", 9.6e9),
            ("large", "OOM", 11e9),
        )
    ]
    unsaid = replace(predict(1.0, 1.0, recompute=""), total=20e9)
    found = figures.Verdicts.of([*rows, unsaid])
    assert found.wrong(0.0) == []
    assert found.wrong(0.05) == ["tight"]
    assert found.wrong(-0.2) == ["large"]
