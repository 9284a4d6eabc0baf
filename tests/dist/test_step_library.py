"""A TrainStep by itself: it saves, loads, and gives logits, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.errors import CheckpointError, DataError
from megapipe.testing import World, run_world
from tests.parity.cases import Case, Rows, configure
from tests.parity.user_models import Own, settle

BASE = Case(dtype="fp64", m=4)
TRAINED = replace(BASE, pp=2)
LAYOUTS = (
    replace(BASE, pp=2, schedule="zb_v"),
    replace(BASE, pp=2, schedule="chimera"),
    replace(BASE, pp=2, in_process=True, zero=3, dp=2, m=2),
    replace(BASE, tp=2, sequence_parallel=True),
)


def make(world: World, case: Case) -> TrainStep:
    config, layout = configure(case)
    grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
    return TrainStep(config, layout, world.mesh(grid))


def mean_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return ((losses * mask.flatten()).sum() / mask.sum()).item()


def train_and_save(world: World, folder: Path) -> tuple[str, float, Tensor]:
    """Train two steps; return the checkpoint, the loss of the next step, and logits."""
    step = make(world, TRAINED)
    rows = Rows(TRAINED)
    for i in range(2):
        step.train(i, rows)
    step.settle()
    path = step.save(folder, 2)
    tokens, labels, mask = rows(range(2))
    logits = step.logits(tokens)
    assert mean_loss(logits, labels, mask) == pytest.approx(step.evaluate(rows, 2).loss, abs=1e-10)
    shorter = step.logits(tokens[:1, :5])  # what follows a token does not matter to it
    torch.testing.assert_close(shorter, logits[:1, :5], rtol=0, atol=1e-10)
    (result,) = step.train(2, rows)
    return str(path), result.loss, logits


def load_in_each(
    world: World, folder: Path, cases: tuple[Case, ...]
) -> list[tuple[int, float, Tensor]]:
    found = []
    for case in cases:
        step = make(world, case)
        step.load(folder)
        tokens, _, _ = Rows(TRAINED)(range(2))
        logits = step.logits(tokens)
        (result,) = step.train(step.position.step, Rows(TRAINED))
        found.append((step.position.step, result.loss, logits))
    return found


def test_what_one_layout_saves_another_goes_on_with(tmp_path: Path) -> None:
    (path, loss, logits), (other_path, *_) = run_world(2, train_and_save, tmp_path)
    assert path == other_path == str(tmp_path / "step-00000002")
    for results in run_world(2, load_in_each, Path(path), LAYOUTS):
        for case, (step, next_loss, own) in zip(LAYOUTS, results, strict=True):
            assert step == 2
            torch.testing.assert_close(own, logits, rtol=0, atol=1e-10, msg=case.name)
            assert next_loss == pytest.approx(loss, abs=1e-9), case.name


def logits_of_few_tokens(world: World) -> tuple[float, float]:
    """Return the loss by the logits, and as validation has it."""
    case = replace(BASE, tp=2, vocab=100)
    step, rows = make(world, case), Rows(case)
    tokens, labels, mask = rows(range(2))
    return mean_loss(step.logits(tokens), labels, mask), step.evaluate(rows, 2).loss


@pytest.mark.full
def test_logits_of_a_vocabulary_that_the_first_rank_holds_alone() -> None:
    """Padded to 128 columns on each rank: those of the second are padding alone."""
    for by_logits, wanted in run_world(2, logits_of_few_tokens):
        assert by_logits == pytest.approx(wanted, abs=1e-10)


def own_logits(world: World, models: tuple[str, ...]) -> list[tuple[float, float]]:
    """Return, for user models, the loss by their logits, and as validation has it."""
    found = []
    for model in models:
        own = Own(model, Case(pp=2, m=2), 6)
        config, layout = settle(own)
        step = TrainStep(config, layout, world.mesh(Grid(pp=2)))
        rows = Rows(own.case)
        tokens, labels, mask = rows(range(2))
        loss = mean_loss(step.logits(tokens), labels, mask)
        found.append((loss, step.evaluate(rows, 2).loss))
    return found


@pytest.mark.full
def test_logits_of_a_model_of_the_user_s() -> None:
    for results in run_world(2, own_logits, ("tuples", "tied")):
        for by_logits, wanted in results:
            assert by_logits == pytest.approx(wanted, abs=1e-10)


def refusals(world: World, folder: Path) -> list[str]:
    step = make(world, TRAINED)
    found = []
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for given in (tokens.double(), tokens[0], tokens.repeat(1, 2), tokens - 1, tokens + 10**6):
        with pytest.raises(DataError) as caught:
            step.logits(given)
        found.append(str(caught.value))
    for name in ("nothing", "damaged"):
        with pytest.raises(CheckpointError) as lost:
            step.load(folder / name)
        found.append(str(lost.value))
    return found


def test_what_cannot_be_read_is_refused_on_every_rank(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    for found in run_world(2, refusals, tmp_path):
        assert "float64 of shape [1, 8]: expected whole numbers [samples, tokens]" in found[0]
        assert "int64 of shape [8]" in found[1]
        assert "16 tokens: expected at most train.sequence_length=8" in found[2]
        assert "ids from -1 to -1: expected 0 to" in found[3]
        assert "ids from 1000000 to 1000000" in found[4]
        assert found[5].endswith("nothing: neither a checkpoint nor a folder that has one")
        assert "damaged/manifest.json" in found[6]
