"""Factors of planned times, fitted to times that a plan with known factors predicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.plan import PlanFactors
from megapipe.config.plan_file import plan_words
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.plan import calibrate_command
from megapipe.plan.calibrate import CATEGORIES, LEAST, MOST, calibrate, planned
from megapipe.plan.calibrate_command import run_calibration
from megapipe.plan.measured_run import MeasuredRun
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.search.command import main
from megapipe.plan.unit import Operation
from megapipe.plan.units import Units

MODEL = (
    *("model.layers=1", "model.hidden=192", "model.heads=4", "model.vocab_size=300"),
    *("train.sequence_length=256", "train.global_batch=8", "plan.device=cpu"),
    *("plan.intra_node_gb_s=1", "plan.link_latency_us=100"),
)
LAYOUTS = ("train.microbatch=1", "train.sequence_length=32", "parallel.tp=2", "parallel.pp=2")
TRUE = PlanFactors(gemm=0.7, attention=1.6, bytes=1.3, host=0.8, link=1.5)


def run_of(keys: str, factors: PlanFactors = TRUE, folder: str = "runs/a") -> MeasuredRun:
    """Make a run whose times are those of a plan with `factors`."""
    config, layout = resolve(parse([*MODEL, *keys.split()]).config, None, None, measure=BY_UNITS)
    kinds: Mapping[tuple[int, Operation], float] = {
        (stage, kind): 1.0 for stage in range(layout.stages) for kind in ("F", "B")
    }
    made = MeasuredRun(Path(folder), Units(config, layout), kinds, 1.0)
    times = planned(made, factors)
    operations = {which: seconds for which, seconds in times.items() if which is not None}
    return made._replace(operations=operations, step=times[None])


def test_known_factors_are_found() -> None:
    found = calibrate([run_of(keys) for keys in LAYOUTS])
    for name in CATEGORIES:
        assert getattr(found.factors, name) == pytest.approx(getattr(TRUE, name), rel=0.06), name
    for each in found.samples:
        assert each.after == pytest.approx(each.measured, rel=0.03)
    assert max(abs(each.before / each.measured - 1) for each in found.samples) > 0.1
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_planned_time_is_linear_in_the_factors() -> None:
    run = run_of("parallel.tp=2")
    once, twice = (
        planned(run, PlanFactors(**dict.fromkeys(CATEGORIES, factor))) for factor in (1.0, 2.0)
    )
    assert twice == {which: pytest.approx(2 * seconds) for which, seconds in once.items()}


def test_a_factor_that_no_run_depends_on_stays_1() -> None:
    found = calibrate([run_of("train.microbatch=2")])
    assert (found.factors.link, found.shares["link"]) == (1.0, 0.0)


@pytest.mark.parametrize("factor", [0.2, 5.0])
@pytest.mark.parametrize("category", ["gemm", "link"])
def test_a_factor_out_of_range_is_refused_by_its_category(category: str, factor: float) -> None:
    wrong = TRUE.model_copy(update={category: factor})
    with pytest.raises(ConfigError, match=rf"category {category} would be .*: expected 0.5 to 2"):
        calibrate([run_of(keys, wrong) for keys in LAYOUTS])
    assert not LEAST <= factor <= MOST


def test_runs_of_other_models_and_devices_are_refused() -> None:
    run = run_of("")
    with pytest.raises(ConfigError, match="runs/b: the run has another model than runs/a"):
        calibrate([run, run_of("model.layers=2", folder="runs/b")])
    with pytest.raises(ConfigError, match=r"plan.device=H100, but runs/a has cpu"):
        calibrate([run, run_of("plan.device=H100 parallel.device=cpu", folder="runs/b")])


def test_what_is_written_is_read_as_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another plan with the written keys predicts the measured step."""
    made = {Path(keys): run_of(keys) for keys in LAYOUTS}
    monkeypatch.setattr(
        calibrate_command.MeasuredRun, "read", staticmethod(lambda folder, keys: made[folder])
    )
    file = tmp_path / "cpu.yaml"
    run_calibration(list(made), ["plan.device=cpu"], file)
    shown = capsys.readouterr().out
    assert "category" in shown
    assert f"megapipe plan --calibration {file}" in shown
    config = parse([*MODEL, *plan_words(file)]).config
    assert config.plan.factors.attention == pytest.approx(TRUE.attention, rel=0.06)
    assert config.plan.link_latency_us == 100
    with pytest.raises(ConfigError, match=r"train.steps=3: --calibrate takes only keys"):
        run_calibration(list(made), ["train.steps=3"], None)


def test_the_command_needs_a_configuration_or_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan.device=cpu"]) != 0
    assert "expected CONFIG and --gpus N, or --calibrate RUN" in capsys.readouterr().err
    assert main(["--calibrate", "runs/nobody", "--device", "cpu"]) != 0
    assert "runs/nobody: expected the folder of a run" in capsys.readouterr().err
