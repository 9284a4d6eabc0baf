"""A user-defined loss that is no sum is noticed at the first micro-batch."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megapipe
from megapipe.model.user_loss import SumCheck
from megapipe.train.callbacks.callback import Callback, Run
from tests.unit.train.objects import Counting, settings

pytestmark = pytest.mark.usefixtures("without_git")

ROWS, LENGTH, VOCABULARY = 2, 8, 31


def total(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return total(logits, labels, mask) / mask.sum()


def mean_of_rows(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return total(logits, labels, mask) / len(labels)


def of_a_tuple(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
    """Compute the loss from logits [s, b, V] and [b s, V], and a tensor that has no rows."""
    first, (second, temperature) = output
    both = first.transpose(0, 1) + second.view_as(first.transpose(0, 1)) * temperature
    return total(both, labels, mask)


def mean_of_a_tuple(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
    return of_a_tuple(output, labels, mask) / len(labels)


def noisy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    numbers = random.random() + np.random.rand()
    return total(F.dropout(logits, 0.5), labels, mask) * (1 + 0 * numbers)


def noisy_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return noisy(logits, labels, mask) / mask.sum()


def at_most(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    assert len(labels) <= ROWS, "too many rows"
    return total(logits, labels, mask)


def mean_of_at_most(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return at_most(logits, labels, mask) / mask.sum()


def exactly(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    assert len(labels) == ROWS, f"{len(labels)} rows"
    return total(logits, labels, mask)


def in_place(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Write into all that is given."""
    logits, found = logits.mul_(3), total(logits, labels, mask)
    labels.zero_()
    mask.zero_()
    return found


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, LENGTH, VOCABULARY, generator=rng)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=rng)
    return logits, labels, torch.rand(ROWS, LENGTH, generator=rng) < 0.7


def of_two(logits: Tensor) -> Any:
    return logits.transpose(0, 1), (logits.flatten(0, 1), torch.tensor(0.5))


MEAN = r"is [\d.]+ for the first micro-batch and [\d.]+ for its {}, as a mean would be: expected"
UNKNOWN = "could not be checked to be a sum"


@pytest.mark.parametrize(
    ("loss", "finding"),
    [
        (total, None),
        (mean, MEAN.format("samples twice")),
        (mean_of_rows, MEAN.format("samples twice")),
        (of_a_tuple, None),
        (mean_of_a_tuple, MEAN.format("samples twice")),
        (noisy, None),
        (noisy_mean, MEAN.format("samples twice")),
        (at_most, None),
        (mean_of_at_most, MEAN.format("halves together")),
        (in_place, None),
        (
            exactly,
            rf"{UNKNOWN}, because it fails for twice the samples: Assert.* 4 rows",
        ),
        (lambda *_: torch.zeros(()), f"{UNKNOWN}: it is 0 for the first micro-batch"),
        (lambda *_: torch.tensor(torch.nan), f"{UNKNOWN}: it is nan for the first micro-batch"),
    ],
)
def test_a_sum_is_told_from_a_mean(loss: Any, finding: str | None) -> None:
    """The loss and all generators are as without the check, which is made once."""

    def call(function: Any) -> tuple[Tensor, Any]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        logits, labels, mask = given()
        output = of_two(logits) if "tuple" in loss.__name__ else logits
        found = function(output, labels, mask)
        numpy = [*map(str, np.random.get_state())]
        return found, [torch.get_rng_state().tolist(), random.getstate(), numpy, labels.tolist()]

    check = SumCheck(loss)
    call(check)
    assert check.finding is None
    check.start()
    (alone, before), (checked, after) = call(loss), call(check)
    assert torch.equal(alone, checked) or alone.isnan()
    assert before == after
    if finding is None:
        assert check.finding is None
    else:
        assert re.match(finding, check.finding or "")


class Notes(Callback):
    """A callback that takes down what a run tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, run: Run) -> None:
        assert run.observer is not None
        note = run.observer.note
        run.observer.note = lambda text: (self.lines.append(text), note(text))[0]  # type: ignore


class Both(nn.Linear):
    """The last layer of :func:`layers`, which returns a tuple."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def layers(vocab_size: int) -> list[nn.Module]:
    return [nn.Embedding(vocab_size, 8), nn.Tanh(), Both(8, vocab_size)]


def noisy_of_both(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
    return noisy(output[0], labels, mask)


def mean_of_both(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
    return noisy_of_both(output, labels, mask) / mask.sum()


def train(folder: Path, loss: Any, **keys: Any) -> tuple[list[str], list[Any]]:
    """Return the lines on the loss, and losses and gradient norms of all steps."""
    torch.manual_seed(5)
    notes, given = Notes(), settings(folder) | {"run.name": "own"}
    given["train"] = given["train"] | {"microbatch": 2} | keys
    run = megapipe.train(given, model=layers, data=Counting, loss=loss, callbacks=[notes])
    records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    steps = [(x["loss"], x["grad_norm"]) for x in records if x["kind"] == "step"]
    return [line for line in notes.lines if line.startswith("train.loss_function=")], steps


def test_each_start_says_so_in_one_line(tmp_path: Path) -> None:
    """A pipeline of two, whose last layer returns a tuple."""
    for keys in ({"stop_after": 2}, {}):
        (line,), steps = train(tmp_path, mean_of_both, **keys)
        name = rf"train\.loss_function={__name__}:mean_of_both "
        assert re.match(name + MEAN.format("samples twice"), line)
    assert len(steps) == 4


def test_the_check_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the run draws random numbers."""
    checked = train(tmp_path / "with", noisy_of_both)
    monkeypatch.setattr("megapipe.train.trainer.LossCheck", Callback)
    assert train(tmp_path / "without", noisy_of_both) == checked == ([], checked[1])
