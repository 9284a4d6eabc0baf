"""User-defined learning-rate plans: what they are given, what they may return, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from megapipe.cli import parse
from megapipe.config.config import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.layout.checks import shortened
from megapipe.layout.resolve import resolve
from megapipe.layout.user_lr_schedule import ARGUMENTS, UserLRSchedule
from megapipe.optim.lr import learning_rate

MODULE = '''
import math

import numpy as np

seen = []


def cosine(step, steps, lr, min_lr, warmup_steps, decay_steps=None):
    """As the built-in one, which counts steps from 0."""
    step -= 1
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    length = decay_steps or max(1, steps - 1 - warmup_steps)
    done = min(1.0, max(0.0, (step - warmup_steps) / length))
    return lr + (min_lr - lr) * 0.5 * (1.0 - math.cos(math.pi * done))


def everything(**given):
    seen.append(given)
    return given["lr"]


def falling(step, lr):
    return lr / step


def warm(step, lr, warmup_steps):
    return np.float32(lr * min(1, step / max(warmup_steps, 1)))


def until_five(step):
    return 1 - step / 5


def odd(step):
    return {1: 1.0, 2: float("nan")}.get(step, 2.0)


def infinite():
    return math.inf


def text():
    return "0.1"


def true():
    return True


def asks(step, epoch):
    return 1.0


def needs_decay(decay_steps):
    return 1.0 / decay_steps


def fails(step):
    return 1 / (step - 1)
'''


@pytest.fixture(autouse=True)
def _plans(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "plans.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    yield
    sys.modules.pop("plans", None)


@pytest.mark.parametrize(
    "settings",
    [{}, {"warmup_steps": 0.1}, {"warmup_steps": 0}, {"decay_steps": 20}, {"min_lr": 0.0}],
    ids=str,
)
def test_a_plan_that_does_as_cosine_gives_the_same_rates(settings: dict[str, object]) -> None:
    steps = 57
    given = {"lr": 1e-2, "min_lr": 1e-3, **settings}
    own = OptimizerConfig.model_validate({**given, "schedule": "plans:cosine"})
    built_in = OptimizerConfig.model_validate({**given, "schedule": "cosine"})
    for step in range(steps):
        assert learning_rate(own, step, steps) == learning_rate(built_in, step, steps)


def test_a_plan_is_given_all_that_it_may_take() -> None:
    settings = {"schedule": "plans:everything", "warmup_steps": 0.1, "decay_steps": 3}
    config = OptimizerConfig.model_validate(settings)
    assert learning_rate(config, 4, 50) == config.lr
    (given,) = sys.modules["plans"].seen
    assert tuple(given) == ARGUMENTS
    assert given == {
        "step": 5, "steps": 50, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 5, "decay_steps": 3
    }  # fmt: skip


def test_the_usual_warm_up_needs_no_room_for_a_decay() -> None:
    config = OptimizerConfig(schedule="plans:warm")
    assert (config.warmup(100), config.warmup(99), config.least_decay(99)) == (100, 9, 0)
    assert OptimizerConfig(schedule="plans:warm", decay_steps=7).least_decay(99) == 7


def test_a_cut_warm_up_is_told_where_there_is_one() -> None:
    def notes(plan: str) -> list[str]:
        return shortened(parse([f"optimizer.schedule=plans:{plan}", "train.steps=50"]).config)

    assert notes("falling") == []
    assert notes("warm")[0].startswith("warm-up of 5 steps")


def test_the_peak_is_the_plan_s_own_matter() -> None:
    """The default of `min_lr` is above this peak, and nobody looks at it."""
    resolve(parse(["optimizer.schedule=plans:falling", "optimizer.lr=1e-6"]).config, 1, None)


@pytest.mark.parametrize(
    ("plan", "overrides", "message"),
    [
        ("falling", ["optimizer.min_lr=0"], "it does not take min_lr, so optimizer.min_lr=0.0 has"),
        (
            "falling",
            ["optimizer.warmup_steps=3"],
            "it does not take warmup_steps, so optimizer.warmup_steps=3 has no effect: exp.* null",
        ),
        ("falling", ["optimizer.decay_steps=3"], "it does not take decay_steps, so"),
        ("until_five", [], "it returned -19.2 for step 101 of 300: expected a finite number of 0"),
        ("odd", ["train.steps=2"], "it returned nan for step 2 of 2"),
        ("odd", ["train.steps=4"], "it returned nan for step 2 of 4"),
        ("infinite", [], "it returned inf for step 1 of 300"),
        ("text", [], "it returned '0.1' for step 1"),
        ("true", [], "it returned True for step 1"),
        ("asks", [], "its parameter epoch needs a default; it can be given step, steps, lr, min_"),
        ("needs_decay", [], "decay_steps must be given"),
        ("fails", [], r"ZeroDivisionError: .*\(plans.py, line \d+\)"),
        ("missing", [], "module 'plans' has no function 'missing'"),
        ("warm", ["optimizer.warmup_steps=301"], "optimizer.warmup_steps=301 leaves too few"),
        ("cosine", ["optimizer.decay_steps=301"], "optimizer.decay_steps=301 is more than train"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_start(
    plan: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f": {message}") as caught:
        resolve(parse([f"optimizer.schedule=plans:{plan}", *overrides]).config, 1, None)
    assert "\n" not in str(caught.value)


def test_a_rate_that_was_not_looked_at_before_is_refused_when_it_comes() -> None:
    config = OptimizerConfig(schedule="plans:odd", warmup_steps=0)
    UserLRSchedule(OptimizerConfig(schedule="plans:odd"), 50).check()
    with pytest.raises(ConfigError, match="it returned nan for step 2 of 50"):
        learning_rate(config, 1, 50)


@pytest.mark.parametrize("wrong", ["cosinus", ":cosine", "a b:c", "plans/x:cosine"])
def test_anything_else_is_no_schedule(wrong: str) -> None:
    with pytest.raises(ConfigError, match="expected one of cosine, linear, wsd, constant, or a fu"):
        parse([f"optimizer.schedule={wrong}"])
