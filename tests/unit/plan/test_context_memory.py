"""Memory of attention by blocks, where short documents go to a kernel at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megapipe.plan.context_memory import attention_workspace, packs_documents
from torch import Tensor

from megapipe.cli import parse
from megapipe.context.packs import PADDING
from megapipe.context.positions import Positions
from megapipe.layers.block_calls import PackedBlocks, Rows
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.block_attention import CpuFlash
from megapipe.ops.documents import Documents, Runs
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.units import Units

LENGTH, HEADS, GROUPS, D = 256, 4, 2, 8
KEYS = (
    f"train.sequence_length={LENGTH}",
    f"model.heads={HEADS}",
    f"model.kv_heads={GROUPS}",
    f"model.hidden={HEADS * D}",
    "model.dtype=bf16",
    "activations.policy=full",
    "activations.keep_attention=true",
)


def resolved(*keys: str, world: int = 1) -> tuple[Any, Layout]:
    config, layout = resolve(parse([*KEYS, *keys]).config, world, None)
    return config, replace(layout, device="cuda")


class Measured:
    """A packed kernel that computes nothing, and notes the most bytes of what it is given copies
    of, what it gives and what it sets aside."""

    def __init__(self, *given: Tensor) -> None:
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.forward_bytes = self.backward_bytes = 0

    def copied(self, *inputs: Tensor) -> int:
        return sum(x.nbytes for x in inputs if x.untyped_storage().data_ptr() not in self.given)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **_: Any) -> Any:
        out, lse = torch.zeros_like(q), torch.zeros(HEADS, len(q))
        size = self.copied(q, k, v) + out.nbytes + lse.nbytes
        self.forward_bytes = max(self.forward_bytes, size)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
        **_: Any,
    ) -> Any:
        found = [torch.zeros_like(x) for x in (q, k, v)]
        aside = PADDING * (len(runs.q_ends) - 1) * HEADS * D * 4
        size = self.copied(grad, q, k, v, out, lse) + sum(x.nbytes for x in found) + aside
        self.backward_bytes = max(self.backward_bytes, size)
        return found


def documents(samples: int, often: float) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    return (torch.rand(samples, LENGTH, generator=generator) < often).long().cumsum(-1)


@pytest.mark.parametrize("often", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("start", [0, LENGTH // 2])
def test_no_documents_take_more_than_is_planned(start: int, samples: int, often: float) -> None:
    """Nor, where there are many, less than half of it."""
    config, layout = resolved("data.document_mask=true")
    assert packs_documents(config, layout)
    length = LENGTH - start
    planned = attention_workspace(layout, samples, length, start, packs=True)
    whole = Positions.whole(LENGTH)
    seen = Documents(documents(samples, often), torch.device("cpu"))
    rows = Rows((whole.rows(start, LENGTH),), (whole,), documents=seen)
    shapes = [(length, HEADS), (LENGTH, GROUPS), (LENGTH, GROUPS)]
    q, k, v = (torch.zeros(n, samples, heads, D, dtype=torch.bfloat16) for n, heads in shapes)
    lse = torch.zeros(samples, HEADS, length)
    kernel = Measured(q, k, v)
    for call in rows.calls(0, 0, CpuFlash(), kernel):
        if isinstance(call, PackedBlocks):
            list(call.forward(q, k, v))
            list(call.backward(q, q, k, v, q, lse))
    found = kernel.forward_bytes, kernel.backward_bytes
    assert all(x <= y for x, y in zip(found, planned, strict=True))
    if often == 1.0:
        assert found[1] > planned[1] / 2


def test_where_it_counts() -> None:
    """On a GPU, in narrow types, where attention ends at documents, for the kernels that do it."""
    masked = "data.document_mask=true"
    config, layout = resolved(masked, "parallel.cp=2", world=2)
    assert packs_documents(config, layout)
    assert not packs_documents(config, replace(layout, device="cpu"))
    for keys in (
        ("model.dtype=fp32",),
        ("kernels.attention=cudnn",),
        ("data.document_mask=false",),
    ):
        assert not packs_documents(*resolved(masked, "parallel.cp=2", *keys, world=2))
    most = peak_activations(Units(config, layout), 0).device
    assert most > peak_activations(Units(*resolved("parallel.cp=2", world=2)), 0).device
