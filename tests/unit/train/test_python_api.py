"""megapipe.train: a run from Python objects is that of the names that they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megapipe
from megapipe.config.config import Config
from megapipe.distributed.mesh import world_size
from megapipe.errors import ConfigError, DataError
from megapipe.optim.rules import Declaration, Elementwise, StateSlice
from megapipe.train.callbacks.callback import Callback, Run, Step
from tests.unit.train.objects import Counting, layers, settings

pytestmark = pytest.mark.usefixtures("without_git")


def squares(output: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    picked = output.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ((picked - 1).square() * mask).sum()


class Plain(Elementwise):
    declaration = Declaration(states=(), elementwise=True)

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        part.master.add_(part.grad, alpha=-lr)


class Seen(Callback):
    """Losses, as the loop of the run has them."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, run: Run, step: Step) -> None:
        self.losses += [result.loss for result in step.results]


def test_callbacks_are_called(tmp_path: Path) -> None:
    seen = Seen()
    folder = megapipe.train(settings(tmp_path), model=layers, data=Counting, callbacks=[seen])
    assert seen.losses == losses(folder)
    assert len(seen.losses) == 4


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.full
def test_objects_train_as_their_names_do(tmp_path: Path) -> None:
    given = settings(tmp_path / "a")
    run = megapipe.train(given, model=layers, data=Counting, loss=squares, rule=Plain)
    assert run.parent == tmp_path / "a"
    assert world_size() is None
    named = settings(tmp_path / "b") | {
        "model.source": f"{layers.__module__}:layers",
        "data.source": f"{Counting.__module__}:Counting",
        "train.loss_function": f"{__name__}:squares",
        "optimizer.rule": f"{__name__}:Plain",
    }
    assert losses(run) == losses(megapipe.train(named))
    assert len(losses(run)) == 4
    assert losses(run)[-1] < losses(run)[0]
    assert (run / "summary.json").exists()
    assert (run / "checkpoints/step-00000004").is_dir()


def test_what_is_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before and after the process group exists, which is gone afterwards."""

    def inner(vocab_size: int) -> list[nn.Module]:
        return layers(vocab_size)

    given = settings(tmp_path)
    for argument, words in (
        ({"model": inner}, "model=.*inner: expected a function or class that is defined at the"),
        ({"model": [nn.Tanh()]}, "model=list: expected a function or class"),
        ({"rule": Counting}, "it is not a class derived from"),
        ({"config": 3}, "config is a int: expected a Config, a mapping or a path"),
        ({"config": {"train.step": 3}}, "megapipe.train: train.step=3: unknown key"),
        ({"config": {"train": 3}}, "train is a section; write train.KEY"),
    ):
        config = argument.pop("config", given)
        with pytest.raises(ConfigError, match=words) as caught:
            megapipe.train(config, **argument)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(Counting, "__len__", lambda self: 0)
    with pytest.raises(DataError):
        megapipe.train(given, model=layers, data=Counting)
    assert world_size() is None


def test_a_configuration_may_be_a_config_or_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("megapipe.train.job.start", lambda command, *_: seen.append(command))
    megapipe.train(Config())
    megapipe.train("quickstart", loss=squares)
    assert seen[0].config == Config()
    assert seen[1].config.train.loss_function == f"{__name__}:squares"
    assert seen[1].config.model.layers == 4


def test_the_surface() -> None:
    assert set(megapipe.__all__) <= set(dir(megapipe))
    for name in megapipe.__all__:
        assert callable(getattr(megapipe, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = megapipe.nothing  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()
