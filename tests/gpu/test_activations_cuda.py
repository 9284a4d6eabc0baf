"""Activation policies on a CUDA device: equal results, and memory that is really free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.layers.offload import ActivationOffload
from megapipe.layers.recompute import SavePolicy, recompute, save_all
from megapipe.testing import run_world
from tests.parity.ranks import OF_ALL_MODELS, Case, check_case, run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = 1 << 22
"""Number of values of a tensor: 16 MiB in fp32."""


def test_every_policy() -> None:
    cases = [
        Case(pp=2, m=4, schedule="zb_h1", in_process=True, model=model, activations=name)
        for name in OF_ALL_MODELS
        for model in ("gpt2", "llama")
    ]
    (outcomes,) = run_world(1, run_cases, cases, "cuda", timeout_s=300)
    for case, outcome in zip(cases, outcomes, strict=True):
        check_case(case, [outcome])


def squares(x: Tensor, times: int, skip_output: bool = False) -> Tensor:
    """Square `x` repeatedly, so that `times` tensors are saved."""
    for _ in range(times):
        x = x * x * 0.7
    return x


def away(inner: SavePolicy) -> tuple[ActivationOffload, SavePolicy]:
    host = ActivationOffload()

    def offload(part: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
        return host.offload(inner, part, x, *rest)

    return host, offload  # type: ignore[return-value]


@pytest.mark.parametrize("inner", [save_all, recompute])
def test_what_is_offloaded_is_not_on_the_device(inner: SavePolicy) -> None:
    _, offload = away(inner)
    leaf = torch.full((SIZE,), 0.9, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = offload(squares, leaf * 1, 4).sum()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < SIZE
    y.backward()
    assert leaf.grad is not None
    other = torch.full((SIZE,), 0.9, device="cuda", requires_grad=True)
    squares(other * 1, 4).sum().backward()
    assert leaf.grad.equal(other.grad)


def test_copies_and_computation_do_not_overtake_each_other() -> None:
    """Several segments in a row, freed memory reused at once, backwards with prefetching."""
    results = []
    for offloads in (False, True):
        host, offload = away(save_all)
        leaf = torch.linspace(0.5, 1.1, SIZE, device="cuda").requires_grad_()
        for _ in range(5):
            host.begin()
            x = leaf * 1
            for _ in range(6):
                x = offload(squares, x, 2) if offloads else squares(x, 2)
                torch.full_like(x, float("nan"))  # takes what was freed
            x.sum().backward()
        results.append(leaf.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].isfinite().all()
    assert results[0].equal(results[1])
