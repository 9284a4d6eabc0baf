"""``megapipe plan --algorithm`` on a small model: its problem against a layout's plan."""

import json
from pathlib import Path

import pytest

from megapipe.cli import configured
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.plan.algorithms.compare import keys_of
from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.measured import measured_problem
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.cache import Cache
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand
from megapipe.plan.search.command import main
from megapipe.plan.search.layouts import with_keys
from megapipe.plan.search.search import Search, split_words
from megapipe.plan.step_time import simulate_step
from megapipe.plan.units import Units

WORDS = (
    *("model.layers=6", "model.hidden=1024", "model.heads=8", "model.kv_heads=2"),
    *("model.vocab_size=8000", "model.dtype=bf16", "model.tied_embeddings=false"),
    *("train.sequence_length=2048", "train.global_batch=8", "plan.device=H100"),
    *("parallel.ranks_per_node=4", "parallel.device=cuda", "plan.gpus=4"),
)


def searched(cache: Path, *more: str) -> Search:
    kept, free = split_words([*WORDS, *more])
    return Search(configured(kept), free, 4, Cache([cache]))


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return measured_problem(
        searched(tmp_path_factory.mktemp("units"), "parallel.tp=1", "train.microbatch=1")
    )


def test_layers_have_two_halves(problem: Problem) -> None:
    names = [unit.name for unit in problem.units]
    assert names[:4] == ["embedding", "attention 0", "mlp 0", "attention 1"]
    assert names[-1] == "head"
    assert problem.block_cuts == (1, 3, 5, 7, 9, 11, 13)
    attention, mlp = (problem.cost(unit, unit + 1) for unit in (1, 2))
    assert min(attention.forward, mlp.forward) > 0.5 * max(attention.forward, mlp.forward)
    assert attention.weights < mlp.weights


@pytest.mark.parametrize("recompute", [False, True])
def test_the_judge_agrees_with_the_plan_of_the_layout(
    problem: Problem, tmp_path: Path, recompute: bool
) -> None:
    again = {1, 2, 3, 4} if recompute else False
    stages = stage(0, 7, [0, 1], recompute=again), stage(7, 14, [2, 3])
    plan = PlannedPipeline(stages, 4)
    judged = judge(problem, plan)
    search = searched(tmp_path)
    keys = keys_of(problem, plan)
    config = with_keys(search.config, keys)
    units = Units(*resolve(config, 4, None, measure=BY_UNITS), Cache([tmp_path]))
    whole = float(simulate_step(units, search.speeds).makespan)
    assert judged.seconds == pytest.approx(whole, rel=0.05)
    room = search.speeds.plannable_bytes
    assert room is not None
    besides = room - problem.memory
    assert max(judged.peaks) + besides == pytest.approx(demand(units).most.total, rel=0.05)


def test_the_command_writes_what_the_trainer_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "plan.yaml"
    words = [word for word in WORDS if not word.startswith("plan.gpus")]
    given = [
        *words,
        "parallel.tp=1",
        "train.microbatch=1",
        "--gpus",
        "4",
        "--algorithm",
        "piper",
        "-o",
        str(path),
    ]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "piper" in printed
    assert "megapipe train" in printed
    assert configured([str(path)]).parallel.pp >= 1
    assert main([*given[:-2], "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["algorithm"] == "piper"
    assert made["gap"] == 0
    assert made["trainer_runs_it"] == (made["obstacle"] is None)
    assert sum(len(each["units"]) for each in made["plan"]) == 14


def test_a_key_that_the_planner_chooses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp=2: a published planner chooses this key"):
        measured_problem(searched(tmp_path, "parallel.pp=2"))
