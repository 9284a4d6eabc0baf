"""A soft cap of logits, in place; sums of losses by the source of their token."""

from __future__ import annotations

import pytest
import torch

from megapipe.layers.cross_entropy import masked_sum, soft_capped


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap_is_that_of_autograd(cap: float) -> None:
    given = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * cap
    expected = given.clone().requires_grad_()
    capped = cap * torch.tanh(expected / cap)
    weight = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (capped * weight).sum().backward()
    leaf = given.clone().requires_grad_()
    logits = leaf * 1
    found = soft_capped(logits, cap)
    assert found.data_ptr() == logits.data_ptr()
    (found * weight).sum().backward()
    assert expected.grad is not None
    assert leaf.grad is not None
    torch.testing.assert_close(found, capped, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-11, atol=1e-13)


def test_sums_by_source() -> None:
    """The mask is 1 + the number of the source; a masked loss may have any value."""
    losses = torch.tensor([[1.0, 2.0], [4.0, float("nan")], [8.0, 16.0]], requires_grad=True)
    mask = torch.tensor([[1, 3], [3, 0], [1, 4]], dtype=torch.uint8)
    found = torch.full((4,), 7.0)
    total = masked_sum(losses, mask, found)
    assert (total.item(), found.tolist()) == (31.0, [9.0, 0.0, 6.0, 16.0])
    total.backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
