"""Head and loss in chunks, in one process: precision, memory, masked tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.distributed.mesh import Axis
from megapipe.layers.activation_policy import LEAST
from megapipe.layers.cross_entropy import masked_sum, vocab_parallel_cross_entropy
from megapipe.layers.linear import ColumnParallelLinear
from megapipe.layers.linear_cross_entropy import linear_cross_entropy
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import column_linear
from megapipe.layers.weight_grad import main_grad
from megapipe.optim.buffers import Bucket, owned_parameters
from tests.parity import reference

TOKENS, HIDDEN, VOCAB = 2 * LEAST, 24, 200


def new_head(weight: Tensor) -> ColumnParallelLinear:
    sharding = Sharding(Axis.alone(), False, weight.dtype)
    head = ColumnParallelLinear(
        sharding, *column_linear("head", tuple(weight.shape), bias=False, std=0.1)
    )
    Bucket(0, list(owned_parameters(head)), Axis.alone(), torch.device("cpu"))
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw hidden states [s, b, h], weight, labels and mask [s, b]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (TOKENS // 2, 2), generator=generator)
    mask = torch.rand(TOKENS // 2, 2, generator=generator) < 0.7
    return hidden.to(dtype), weight.to(dtype), labels, mask


def run(dtype: torch.dtype, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, gradient of the hidden states, main gradient; chunk 0: head, then loss."""
    hidden, weight, labels, mask = data(dtype)
    hidden.requires_grad_()
    head = new_head(weight)
    head.sharding.queue.open(0)
    if chunk:
        loss = linear_cross_entropy(hidden, head, labels, mask, vocab_size=VOCAB, chunk=chunk)
    else:
        losses = vocab_parallel_cross_entropy(head(hidden), labels, Axis.alone(), VOCAB)
        loss = masked_sum(losses, mask)
    (loss / TOKENS).backward()
    head.sharding.queue.run(0)
    assert hidden.grad is not None
    return loss.detach(), hidden.grad, main_grad(head.weight)


@pytest.mark.parametrize("chunk", [10, TOKENS])
def test_a_soft_cap_is_that_of_autograd(chunk: int) -> None:
    hidden, weight, labels, mask = data(torch.float64)
    cap, x, matrix = 3.0, hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = cap * torch.tanh(x.flatten(0, 1) @ matrix.t() / cap)
    losses = functional.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = losses[mask.flatten()].sum()
    expected.backward()
    head, given = new_head(weight), (labels, mask)
    head.sharding.queue.open(0)
    hidden.requires_grad_()
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "chunk": chunk, "softcap": cap}
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, head, *given, **sizes)
    loss = linear_cross_entropy(hidden, head, *given, **sizes)
    loss.backward()
    head.sharding.queue.run(0)
    torch.testing.assert_close(alone, expected.detach(), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(hidden.grad, x.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(main_grad(head.weight), matrix.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chunk", [0, 10, TOKENS])
def test_losses_by_source(chunk: int) -> None:
    """Sources 0 and 2 of 4 are there; each sum is that of the tokens of its source."""
    hidden, weight, labels, mask = data(torch.float64)
    generator = torch.Generator().manual_seed(1)
    sources = torch.randint(0, 2, mask.shape, generator=generator) * 2
    mixed = (mask * (1 + sources)).to(torch.uint8)
    exact = functional.cross_entropy(
        hidden.flatten(0, 1) @ weight.t(), labels.flatten(), reduction="none"
    )
    expected = [exact[(mixed == 1 + source).flatten()].sum() for source in range(4)]
    head, found = new_head(weight), torch.full((4,), math.nan, dtype=torch.float64)
    head.sharding.queue.open(0)
    hidden.requires_grad_()
    for _ in range(2):  # the second time as where a stage is recomputed
        if chunk:
            loss = linear_cross_entropy(
                hidden, head, labels, mixed, vocab_size=VOCAB, chunk=chunk, by_source=found
            )
        else:
            losses = vocab_parallel_cross_entropy(head(hidden), labels, Axis.alone(), VOCAB)
            loss = masked_sum(losses, mixed, found)
    loss.backward()
    head.sharding.queue.run(0)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.detach(), exact[mask.flatten()].sum(), rtol=1e-12, atol=0)
    assert found[1] == found[3] == 0


def test_a_loss_that_is_not_finite_stays_with_its_source() -> None:
    losses, found = torch.tensor([[1.0, math.inf], [2.0, math.nan]]), torch.zeros(2)
    masked_sum(losses, torch.tensor([[1, 2], [1, 0]], dtype=torch.uint8), found)
    assert found.tolist() == [3.0, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [10, TOKENS])
def test_no_less_precise_than_head_then_loss(dtype: torch.dtype, chunk: int) -> None:
    hidden, weight, labels, mask = (t.double() if t.is_floating_point() else t for t in data(dtype))
    hidden.requires_grad_()
    weight.requires_grad_()
    exact = functional.cross_entropy(
        hidden.flatten(0, 1) @ weight.t(), labels.flatten(), reduction="none"
    )
    exact = exact[mask.flatten()].sum()
    (exact / TOKENS).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    names = ("loss", "hidden", "weight")
    expected = dict(zip(names, (exact.detach(), hidden.grad, weight.grad), strict=True))
    chunked, whole = (dict(zip(names, run(dtype, c), strict=True)) for c in (chunk, 0))
    for result in (chunked, whole):
        assert result["loss"].dtype == torch.float32
        assert result["hidden"].dtype == dtype
        assert result["weight"].dtype == torch.float32
    reference.assert_error_like(chunked, whole, expected)


class Largest(TorchDispatchMode):
    """A mode that notes the most elements of a tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        sizes = [t.numel() for t in outputs if isinstance(t, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_are_never_more_logits_than_those_of_a_chunk(dtype: torch.dtype) -> None:
    with Largest() as whole:
        run(dtype, 0)
    assert whole.elements == TOKENS * VOCAB, "the measure sees the logits"
    with Largest() as chunked:
        run(dtype, 8)
    assert chunked.elements == TOKENS * HIDDEN, "the hidden states are the largest"
    with Largest() as large:
        run(dtype, 10 * TOKENS)
    assert large.elements == TOKENS // 2 * VOCAB, "a chunk for all would be their whole array"


def test_a_token_that_is_masked_may_have_any_label() -> None:
    hidden, weight, labels, mask = data(torch.float64)
    head = new_head(weight)
    results = []
    for label in (0, -100, VOCAB, VOCAB + 1000):
        with torch.no_grad():
            changed = labels.masked_fill(~mask, label)
            results.append(
                linear_cross_entropy(hidden, head, changed, mask, vocab_size=VOCAB, chunk=7)
            )
    assert all(result.equal(results[0]) for result in results)


def test_without_any_token_loss_and_gradients_are_zero() -> None:
    hidden, weight, labels, mask = data(torch.float64)
    hidden.requires_grad_()
    head = new_head(weight)
    loss = linear_cross_entropy(
        hidden, head, labels, torch.zeros_like(mask), vocab_size=VOCAB, chunk=7
    )
    (loss * 0.0).backward()
    assert hidden.grad is not None
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not main_grad(head.weight).any()
