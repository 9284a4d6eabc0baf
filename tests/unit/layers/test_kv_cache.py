"""Keys and values handed on from slice to slice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megapipe.layers.kv_cache import KVCache

LENGTHS = (3, 1, 4)


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 3, 5, generator=generator, dtype=torch.float64)


def whole_gradients(seen: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of sum_j <factors[j], slices 0..j> by plain autograd."""
    leaves = [piece.detach().clone().requires_grad_() for piece in seen]
    total = sum((torch.cat(leaves[: j + 1]) * f).sum() for j, f in enumerate(factors))
    assert isinstance(total, Tensor)
    total.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_every_slice_sees_itself_and_those_before_it() -> None:
    cache = KVCache(sum(LENGTHS))
    start = 0
    pieces: list[tuple[Tensor, Tensor]] = []
    views: list[tuple[Tensor, Tensor]] = []
    for j, n in enumerate(LENGTHS):
        pieces.append((rows(n, 2 * j), rows(n, 2 * j + 1)))
        views.append(cache.extend(7, start, *pieces[-1]))
        start += n
    for j in range(len(LENGTHS)):
        for view, column in zip(views[j], zip(*pieces, strict=True), strict=True):
            assert view.equal(torch.cat(column[: j + 1])), "later slices left it as it was"


def test_gradients_reach_earlier_slices() -> None:
    cache = KVCache(sum(LENGTHS))
    ends = list(itertools.accumulate(LENGTHS))
    keys = [rows(n, j).requires_grad_() for j, n in enumerate(LENGTHS)]
    values = [rows(n, j + 10).requires_grad_() for j, n in enumerate(LENGTHS)]
    factors = [(rows(end, j + 20), rows(end, j + 30)) for j, end in enumerate(ends)]
    losses = []
    for j, n in enumerate(LENGTHS):
        k, v = cache.extend(0, ends[j] - n, keys[j], values[j])
        losses.append((k * factors[j][0]).sum() + (v * factors[j][1]).sum())
    for j in (2, 1, 0):
        assert keys[j].grad is None, "only its own backward gives a slice its gradient"
        losses[j].backward()
    for pieces, own in ((keys, [k for k, _ in factors]), (values, [v for _, v in factors])):
        for piece, expected in zip(pieces, whole_gradients(pieces, own), strict=True):
            assert piece.grad is not None
            torch.testing.assert_close(piece.grad, expected, rtol=0, atol=1e-14)


def test_layers_do_not_mix() -> None:
    cache = KVCache(2)
    a, b = rows(1, 0), rows(1, 1)
    for start in (0, 1):
        assert cache.extend(0, start, a, a)[0].equal(torch.cat([a] * (start + 1)))
        assert cache.extend(1, start, b, b)[0].equal(torch.cat([b] * (start + 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """1 + 3 x 2**-9 is 1 + 2**-7 in bf16; added one by one in bf16 it would stay 1."""
    cache = KVCache(4)
    first = torch.zeros(1, 1, 1, 1, dtype=dtype, requires_grad=True)
    outputs = [cache.extend(0, 0, first, first)[0]]
    for start in (1, 2, 3):
        new = torch.zeros(1, 1, 1, 1, dtype=dtype, requires_grad=True)
        outputs.append(cache.extend(0, start, new, new)[0])
    for j, factor in ((3, 1.0), (2, 2.0**-9), (1, 2.0**-9), (0, 2.0**-9)):
        (outputs[j] * factor).sum().backward()
    assert first.grad is not None
    expected = 1 + (2.0**-7 if dtype == torch.bfloat16 else 3 * 2.0**-9)
    assert first.grad.item() == expected


def test_a_forward_that_runs_again_changes_nothing() -> None:
    """Layers that recompute within the backward write the same rows a second time."""
    cache = KVCache(2)
    a, b = rows(1, 0).requires_grad_(), rows(1, 1).requires_grad_()
    (cache.extend(0, 0, a, a)[0] ** 2).sum()
    loss = (cache.extend(0, 1, b, b)[0] ** 2).sum()
    with torch.no_grad():
        cache.extend(0, 1, b, b)
    loss.backward()
    assert b.grad is not None
    assert b.grad.equal(2 * b.detach())
