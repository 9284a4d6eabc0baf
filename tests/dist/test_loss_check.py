"""What ranks with the last stage find out about a loss is told once, on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

SOURCE = """
import torch
import torch.distributed as dist
from torch.nn import functional

def mean(logits, labels, mask):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def shared_mean(logits, labels, mask):
    if dist.is_initialized():  # replicas wait for each other, also in the check
        dist.all_reduce(torch.zeros(1))
    return mean(logits, labels, mask)
"""


@pytest.mark.parametrize(
    ("loss", "layout"), [("mean", "parallel.pp=2"), ("shared_mean", "parallel.dp=2")]
)
def test_a_mean_is_told_once(tmp_path: Path, loss: str, layout: str) -> None:
    (tmp_path / "my_loss.py").write_text(SOURCE)
    settings = tiny(tmp_path) | {"train.loss_function": f"my_loss:{loss}"}
    outcome = run_forked(tmp_path, 2, *arguments(settings), layout)
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count(f"train.loss_function=my_loss:{loss} is ") == 1
    assert outcome.text.index("as a mean would be") < outcome.text.index("step 1/3")
