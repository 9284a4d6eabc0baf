"""Functions that inductor is given to compile compute what torch's kernels do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megapipe.ops import loss, rotary, swiglu
from megapipe.ops.activation import Activate
from megapipe.ops.loss import InductorLoss, Labels, LossKernel, TorchLoss
from megapipe.ops.moe import elementwise as expert_rows
from megapipe.ops.moe.elementwise import InductorRows, TorchRows
from megapipe.ops.probe import choose_kernel
from tests.parity.inductor_kernels import chosen

CPU = torch.device("cpu")
VOCAB, WIDTH, TOKENS = 37, 20, 11


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace compiled functions by the functions themselves."""
    for module in (loss, rotary):
        monkeypatch.setattr(module, "compile_elementwise", lambda function: function)
    for module in (swiglu, expert_rows):
        monkeypatch.setattr(module, "compile_rows", lambda function: function)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("uncompiled")
def test_they_pass_their_self_checks(dtype: torch.dtype) -> None:
    assert [choice.name for choice in chosen(dtype)] == ["inductor"] * 4


def test_on_a_cpu_they_are_taken_by_name_alone() -> None:
    for module in (loss, rotary, swiglu, expert_rows):
        candidates: Any = module.candidates(device=CPU, dtype=torch.float32)
        assert choose_kernel("one", "auto", candidates).name == "torch"


def test_without_triton_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    choice = choose_kernel(
        "loss", "auto", loss.candidates(device=torch.device("cuda"), dtype=torch.half)
    )
    assert choice.name == "torch"
    assert choice.why.startswith("inductor: ")


def test_rows_are_compiled_once_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have other numbers of rows in each micro-batch, none and one among them."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    gate = swiglu.inductor_swiglu()
    for shape in [(5,), (7,), (0,), (1,), (2,), (64,), (3, 4), (1000,), (7,)]:
        both = torch.randn(*shape, 2 * WIDTH, requires_grad=True)
        grad = torch.randn(*shape, WIDTH)
        found, usual = (kernel(both) for kernel in (gate, swiglu.torch_swiglu))
        torch.testing.assert_close(found, usual)
        torch.testing.assert_close(*(torch.autograd.grad(y, [both], grad) for y in (found, usual)))
    assert counter.frame_count == 2, "forward and backward"


@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh", "gelu", "gelu_tanh"])
@pytest.mark.usefixtures("uncompiled")
def test_rows_of_experts(kind: str) -> None:
    """Inductor's functions give what torch's do, for any number of rows."""
    kernel, usual, activation = InductorRows(), TorchRows(), Activate(kind)
    width = WIDTH * len(activation.split(torch.empty(1, 2)))
    generator = torch.Generator().manual_seed(7)
    for rows in (0, 1, 2, 9):
        wide, grad, weight = (
            torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
            for shape in ((width,), (WIDTH,), ())
        )
        assert_same(
            [kernel.activate_and_weight(wide, weight, activation)],
            [usual.activate_and_weight(wide, weight, activation)],
        )
        grads = [of.gradients(wide, weight, grad.clone, activation) for of in (kernel, usual)]
        assert_same(*grads)


@pytest.mark.usefixtures("uncompiled")
def test_sums_of_the_rows_of_tokens() -> None:
    kernel, usual = InductorRows(), TorchRows()
    for rows, tokens in ((1, 4), (6, 1), (6, 4)):
        values = torch.randn(rows, WIDTH, dtype=torch.float64)
        slots = torch.arange(tokens * 3).view(tokens, 3) * 5 % rows
        sums = [of.unpermute(values, slots, torch.float64) for of in (kernel, usual)]
        torch.testing.assert_close(*sums, rtol=0, atol=0)


def assert_same(found: Sequence[Tensor], usual: Sequence[Tensor]) -> None:
    for a, b in zip(found, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def of_all_ranks(kernel: LossKernel, logits: Tensor, labels: Tensor, weights: Tensor) -> Any:
    """Return losses and gradient of logits [n, 2 * WIDTH], the last ones of two ranks padding."""
    places = [Labels.of(labels, WIDTH, rank, VOCAB) for rank in range(2)]
    parts = [part.clone() for part in logits.split(WIDTH, dim=-1)]
    gathered = torch.stack([kernel.local_stats(*each) for each in zip(parts, places, strict=True)])
    found = [
        kernel.results(part, place, gathered, weights)
        for part, place in zip(parts, places, strict=True)
    ]
    assert found[0][0].equal(found[1][0])
    return found[0][0], torch.cat([gradient for _, gradient in found], dim=-1)


@pytest.mark.parametrize("kernel", [TorchLoss, InductorLoss])
@pytest.mark.usefixtures("uncompiled")
def test_a_loss_over_two_ranks_is_cross_entropy(kernel: type[LossKernel]) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(TOKENS, 2 * WIDTH, generator=generator, dtype=torch.float64) * 30
    labels = torch.arange(TOKENS) * 3 % VOCAB
    weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    whole = logits[:, :VOCAB].clone().requires_grad_()
    right = torch.nn.functional.cross_entropy(whole, labels, reduction="none")
    (right * weights).sum().backward()
    assert whole.grad is not None
    losses, gradient = of_all_ranks(kernel(), logits, labels, weights)
    torch.testing.assert_close(losses, right.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient[:, :VOCAB], whole.grad, rtol=1e-12, atol=1e-15)
    assert not gradient[:, VOCAB:].any(), "padding has no gradient"


@pytest.mark.parametrize("kernel", [TorchLoss, InductorLoss])
@pytest.mark.usefixtures("uncompiled")
def test_a_rank_of_padding_alone_adds_nothing(kernel: type[LossKernel]) -> None:
    logits = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    labels = Labels.of(torch.zeros(TOKENS, dtype=torch.int64), WIDTH, 1, WIDTH)
    assert labels.columns == 0
    shares = kernel().local_stats(logits.clone(), labels)
    top, total, target = shares
    assert top.isfinite().all()
    assert not (total * (top - 3).exp()).any()
    assert not target.any()
