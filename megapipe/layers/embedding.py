"""Token and position embeddings with deferred weight gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter, functional

from megapipe.context.positions import Positions
from megapipe.distributed.collectives import (
    Wait,
    all_reduce,
    done,
    reduce_scatter,
    start_all_gather_new,
)
from megapipe.layers.parameter import (
    Sharding,
    new_parameter,
    spec_of,
)
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.weight_grad import main_grad


@dataclass
class _WordTask:
    """Weight gradient of a WordEmbedding, from tokens [b, s] and output gradient [s(/tp), b, h]."""

    layer: WordEmbedding
    tokens: Tensor
    grad: Tensor
    _whole: Tensor | None = None
    _arrived: Wait = done

    @property
    def weight(self) -> Parameter:
        return self.layer.weight

    def begin(self) -> None:
        if self.layer.sharding.kernels.overlap:
            self._gather()

    def run(self) -> None:
        layer = self.layer
        grad = self._gather()
        row, elsewhere = layer.local_rows(self.tokens)
        target = main_grad(layer.weight)
        self._arrived()
        source = grad.flatten(0, 1).to(target.dtype)
        if layer.sharding.tp.size > 1:
            source = source.masked_fill(elsewhere.t().reshape(-1, 1), 0)
        target.index_add_(0, row.t().flatten(), source)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.grad

    def _gather(self) -> Tensor:
        """Return the output gradient of all positions [s, b, h]; call `_arrived` before use."""
        sharding = self.layer.sharding
        if not sharding.sequence_split:
            return self.grad
        if self._whole is None:
            self._whole, self._arrived = start_all_gather_new(self.grad, sharding.tp)
        return self._whole


class _WordFunction(Function):
    @staticmethod
    def forward(ctx: Any, weight: Parameter, tokens: Tensor, layer: WordEmbedding) -> Tensor:
        ctx.layer = layer
        ctx.tokens = tokens
        row, elsewhere = layer.local_rows(tokens)
        y = functional.embedding(row.t(), weight)  # [s, b, h]
        if layer.sharding.tp.size == 1:
            return y
        y = y.masked_fill_(elsewhere.t().unsqueeze(-1), 0)
        if layer.sharding.sequence_split:
            return reduce_scatter(y, layer.sharding.tp)
        return all_reduce(y, layer.sharding.tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        sharding = ctx.layer.sharding
        later = sharding.sequence_split and sharding.kernels.overlap
        sharding.queue.put(_WordTask(ctx.layer, ctx.tokens, grad), later=later)
        return None, None, None


class WordEmbedding(nn.Module):
    """Vocabulary-parallel lookup: tokens [b, s] -> [s(/tp), b, h].

    Each tp rank has a range of the table and contributes zeros for other tokens. Token ids are
    checked when batches are made, so all ids are inside the vocabulary.
    """

    def __init__(self, sharding: Sharding, weight: ParameterSpec) -> None:
        super().__init__()
        self.sharding = sharding
        self.weight = new_parameter(sharding, weight)

    def local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's row in the local table (0 if another rank has the token), and
        whether another rank has the token."""
        spec = spec_of(self.weight)
        row = tokens - spec.offsets[0]
        elsewhere = (row < 0) | (row >= spec.sizes[0])
        return row.masked_fill(elsewhere, 0), elsewhere

    def forward(self, tokens: Tensor) -> Tensor:
        return _WordFunction.apply(self.weight, tokens, self)


@dataclass
class _PositionTask:
    layer: PositionEmbedding
    here: Positions
    positions: Tensor | None  # [s(/tp), b]
    grad: Tensor  # [s(/tp), b, h]

    @property
    def weight(self) -> Parameter:
        return self.layer.weight

    def begin(self) -> None:
        """Start nothing: no operand is gathered."""

    def run(self) -> None:
        target = main_grad(self.layer.weight)
        if self.positions is not None:
            source = self.grad.flatten(0, 1).to(target.dtype)
            target.index_add_(0, self.positions.flatten(), source)
            return
        row = 0
        for run in self.here.runs:
            part = self.grad[row : row + run.length]
            target[run.here].add_(part.sum(1, dtype=target.dtype))
            row += run.length

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad,) if self.positions is None else (self.grad, self.positions)


class _PositionFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        layer: PositionEmbedding,
        here: Positions,
        positions: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.here, ctx.positions = layer, here, positions
        if positions is not None:
            return x + weight[positions]
        runs = [weight[run.here] for run in here.runs]
        return x + (runs[0] if len(runs) == 1 else torch.cat(runs)).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.layer.sharding.queue.put(_PositionTask(ctx.layer, ctx.here, ctx.positions, grad))
        return grad, None, None, None, None


class PositionEmbedding(nn.Module):
    """Adds a learned vector per position to [s(/tp), b, h]; every tp rank holds the table."""

    def __init__(self, sharding: Sharding, weight: ParameterSpec) -> None:
        super().__init__()
        self.sharding = sharding
        self.weight = new_parameter(sharding, weight)

    def forward(self, x: Tensor, here: Positions, positions: Tensor | None = None) -> Tensor:
        """Add each position's vector to x. `here` has the positions before sequence parallelism
        splits them; `positions` [s, b], if given, replaces it by one position per token."""
        if self.sharding.sequence_split:
            here = here.part(self.sharding.tp.index, self.sharding.tp.size)
            if positions is not None:
                positions = positions.chunk(self.sharding.tp.size)[self.sharding.tp.index]
        return _PositionFunction.apply(x, self.weight, self, here, positions)
