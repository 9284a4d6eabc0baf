"""The members of a run's state: each is given what a checkpoint has of it, by its name and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint import Checkpoint, Meta, SingleProcess, save
from megapipe.checkpoint.stateful import Stateful
from megapipe.checkpoint.writer import Piece
from megapipe.errors import CheckpointError, ConfigError
from megapipe.optim.loss_scaler import LossScaler
from megapipe.train.anomaly_detection import AnomalyDetector
from megapipe.train.async_training.async_training import AsyncTraining
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from megapipe.train.state import RunState
from megapipe.train.step.data import StepData
from megapipe.util.skipped_samples import SkippedSamples

MEMBERS: dict[str, type[Stateful]] = {
    each.name: each
    for each in (StepData, AnomalyDetector, LossScaler, ExpertRebalancer, AsyncTraining)
}


class Given(Stateful):
    """A member that keeps what it is given."""

    def load(self, stored: Any) -> None:
        self.given = stored


class Odd(Stateful):
    """A member that takes only even numbers."""

    name = "odd"
    kind = int

    def load(self, stored: int | None) -> None:
        if stored is not None and stored % 2:
            raise ValueError(f"{stored} is odd: expected an even number")


class Buffers(Stateful):
    """A member with two tensors."""

    name = "own"

    def __init__(self) -> None:
        self.values = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(7)}

    def buffers(self) -> Mapping[str, Tensor]:
        return self.values


class HasNothing(Stateful):
    """A member that overrides nothing."""


def given(name: str) -> Given:
    """Make a member of the name and type of one of megapipe's."""
    of = MEMBERS[name]
    return type("Given", (Given,), {"name": name, "kind": of.kind})()


def run_of(*members: Stateful) -> RunState:
    machine: Any = SimpleNamespace()
    data: Any = Given()
    return RunState(machine, data, members, lambda: None)


def stored(folder: Path, pieces: Iterable[Piece] = (), **coordinates: Any) -> Checkpoint:
    meta = Meta(run_id="a-run", layout={}, coordinates={"samples": 24, **coordinates}, config={})
    return Checkpoint.open(save(folder, step=3, pieces=pieces, meta=meta, group=SingleProcess()))


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("skipped_samples", [[5, 7], [1, 2]], SkippedSamples(((1, 2), (5, 7)))),
        ("anomaly_state", {"skipped": 2}, {"skipped": 2}),
        ("loss_scale", {"scale": 8.0, "good_steps": 3}, {"scale": 8.0, "good_steps": 3.0}),
        ("expert_owners", {"0": [1, 0]}, {"0": [1, 0]}),
        ("async_schedule", "stash", "stash"),
    ],
)
def test_a_member_is_given_what_is_its_own(
    name: str, value: Any, taken: Any, tmp_path: Path
) -> None:
    member, other = given(name), given(next(each for each in MEMBERS if each != name))
    run_of(member, other).prepare(stored(tmp_path, **{name: value}))
    assert (member.given, other.given) == (taken, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("skipped_samples", value) for value in (3, [[5, 4]], [[1]], {"a": 1}, None)),
        *(("anomaly_state", value) for value in ([1], "x", None)),
        *(("loss_scale", value) for value in ([1], {"scale": "x"}, None)),
        *(("expert_owners", value) for value in ([1], {"0": 1}, {"0": [-1]}, {"0": ["1"]})),
        ("async_schedule", 1),
    ],
)
def test_another_type_is_one_line(name: str, value: Any, tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, **{name: value})
    with pytest.raises(CheckpointError) as caught:
        run_of(given(name)).prepare(checkpoint)
    told = str(caught.value)
    assert told.startswith(f"{checkpoint.path}: coordinates.{name}")
    assert "\n" not in told


def test_a_value_that_a_member_refuses_is_one_line(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, odd=3)
    with pytest.raises(CheckpointError) as caught:
        run_of(Odd()).prepare(checkpoint)
    assert str(caught.value) == (
        f"{checkpoint.path}: coordinates.odd: 3 is odd: expected an even number"
    )


def test_buffers_are_filled_with_those_of_a_checkpoint(tmp_path: Path) -> None:
    """They have any shape and order in memory; what the checkpoint lacks stays."""
    saved, loaded = Buffers(), Buffers()
    checkpoint = stored(tmp_path, pieces=saved.tensors())
    assert set(saved.entries()) == set(checkpoint.names()) == {"own/a", "own/b"}
    for tensor in loaded.values.values():
        tensor.fill_(-1)
    loaded.values["c"] = torch.tensor([5.0])
    loaded.read(checkpoint, set(checkpoint.names()))
    for name in ("a", "b"):
        assert torch.equal(loaded.values[name], saved.values[name])
    assert loaded.values["c"].item() == 5.0


def test_whoever_overrides_nothing_has_nothing(tmp_path: Path) -> None:
    member = HasNothing()
    run_of(member, member).prepare(stored(tmp_path))
    assert member.state() is None
    assert not [*member.tensors()]
    assert not [*member.entries()]


@pytest.mark.parametrize("name", ["odd", "samples", "step", "lr"])
def test_a_name_is_of_one_member(name: str) -> None:
    twice = type("Twice", (Stateful,), {"name": name})()
    with pytest.raises(ConfigError) as caught:
        run_of(Odd()).add(twice)
    assert str(caught.value) == (
        f"Twice.name='{name}' is the name of another part of a checkpoint: expected a unique name"
    )


def test_buffers_need_a_name() -> None:
    nameless = type("Nameless", (Buffers,), {"name": ""})()
    with pytest.raises(ConfigError, match=r"^Nameless has buffers and no name: expected `name`"):
        run_of(nameless)
