"""Experts of transformers classes: rows are sorted by expert, and each expert multiplies its own.

On torch's meta device, where nobody knows which expert a router chooses, all experts get equally
many rows. So plans need no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "megapipe"
"""Name by which transformers finds :func:`experts`."""


def experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the chosen experts' outputs.

    `self`: a module with the experts' weights, as transformers names them. `hidden`: [t, h];
    `chosen`: expert numbers [t, k]; `weights`: [t, k].
    """
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        y: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden, chosen, weights)
        return y
    number, top_k = self.num_experts, chosen.shape[-1]
    of_row = chosen.flatten()
    order = of_row.argsort(stable=True)
    tokens = order // top_k
    counts = even_counts(len(of_row), number) if hidden.is_meta else row_counts(of_row, number)
    up = (self.gate_up_proj, "gate_up_proj") if self.has_gate else (self.up_proj, "up_proj")
    rows = _by_expert(self, hidden[tokens], *up, counts)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _by_expert(self, rows, self.down_proj, "down_proj", counts)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    rows = rows * weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(-1, top_k, rows.shape[-1]).sum(1).to(hidden.dtype)


def _by_expert(self: Any, rows: Tensor, weight: Tensor, name: str, counts: list[int]) -> Tensor:
    """Multiply the rows of each expert by its matrix: [r, in] -> [r, out]."""
    biases = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * len(counts)
    matrices = weight.mT.unbind() if self.is_transposed else weight.unbind()
    parts = zip(rows.split(counts), matrices, biases, strict=True)
    return torch.cat([functional.linear(*part) for part in parts])


def row_counts(of_row: Tensor, number: int) -> list[int]:
    counts: list[int] = torch.bincount(of_row, minlength=number).tolist()
    return counts


def even_counts(rows: int, number: int) -> list[int]:
    """Return the number of rows of each expert if all have equally many, up to one."""
    return [rows // number + (expert < rows % number) for expert in range(number)]


def register() -> None:
    """Make :func:`experts` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
