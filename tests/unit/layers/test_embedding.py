"""Learned positions: those of rows in runs, and those that each token has of its own."""

from __future__ import annotations

import pytest
import torch

from megapipe.context.positions import Positions, StridedRange
from megapipe.distributed.mesh import Axis
from megapipe.layers.embedding import PositionEmbedding
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import positions
from megapipe.layers.weight_grad import main_grad
from megapipe.optim.buffers import Bucket, owned_parameters

LENGTH, ROWS, HIDDEN, TABLE = 6, 3, 4, 11
RUNS = Positions((StridedRange(2, 4), StridedRange(8, 2)))
OWN = torch.tensor([[0, 5, 9], [1, 6, 10], [2, 0, 0], [3, 1, 1], [4, 2, 2], [0, 3, 3]])


@pytest.mark.parametrize("own", [None, OWN], ids=["in runs", "of each token"])
def test_values_and_gradients_are_those_of_autograd(own: torch.Tensor | None) -> None:
    sharding = Sharding(Axis.alone(), False, torch.float64)
    layer = PositionEmbedding(sharding, positions("position", TABLE, HIDDEN, std=0.1))
    bucket = Bucket(0, list(owned_parameters(layer)), Axis.alone(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    table, x, grad = (
        torch.randn(*size, HIDDEN, dtype=torch.float64, generator=generator)
        for size in ((TABLE,), (LENGTH, ROWS), (LENGTH, ROWS))
    )
    with torch.no_grad():
        layer.weight.copy_(table)
    bucket.zero_grad()
    table.requires_grad_()
    places = torch.tensor([*RUNS]).unsqueeze(1).expand(LENGTH, ROWS) if own is None else own
    expected = x + table[places]
    expected.backward(grad)
    sharding.queue.open(0)
    found = layer(x.requires_grad_(), RUNS, own)
    found.backward(grad)
    sharding.queue.run(0)
    assert torch.equal(found, expected)
    assert x.grad is not None
    assert torch.equal(x.grad, grad)
    torch.testing.assert_close(main_grad(layer.weight), table.grad, rtol=1e-13, atol=1e-14)
