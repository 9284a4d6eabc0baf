"""A loss of the user's that is no sum is noticed before it trains."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.model.own_loss import looks_like_a_mean
from megapipe.train.opening import _of_loss


def total(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return total(logits, labels, mask) / mask.sum()


def mean_of_rows(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return total(logits, labels, mask) / len(logits)


def of_logits_alone(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """With a term that is 0 for any logits."""
    return total(logits, labels, mask) + 0 * logits.mean()


def picky(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
    return total(output[0]["logits"], labels, mask)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (total, False),
        (of_logits_alone, False),
        (mean, True),
        (mean_of_rows, True),
        (picky, False),
        (lambda logits, labels, mask: logits.sum() * 0, False),
    ],
)
def test_a_mean_is_told_from_a_sum(loss: Any, expected: bool) -> None:
    before = torch.get_rng_state()
    assert looks_like_a_mean(loss, 31, 8) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "tells"), [("mean", True), ("total", False), (None, False)])
def test_a_run_says_so_in_one_line(
    name: str | None, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("my_losses")
    module.__dict__.update(mean=mean, total=total)
    monkeypatch.setitem(sys.modules, "my_losses", module)
    given = [] if name is None else [f"train.loss=my_losses:{name}"]
    config, _ = resolve(parse(["model.vocab_size=257", *given]).config, 1, None)
    run: Any = SimpleNamespace(config=config, mesh=SimpleNamespace(rank=0))
    lines = list(_of_loss(run))
    assert bool(lines) == tells
    if tells:
        assert lines[0].startswith("train.loss=my_losses:mean gives the same for a sequence and")
    run.mesh.rank = 1
    assert list(_of_loss(run)) == []
