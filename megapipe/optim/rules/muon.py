"""Muon: momentum made orthogonal, for the matrices of the layers (Jordan et al., 2024).

https://kellerjordan.github.io/posts/muon; ``torch.optim.Muon`` is the reference. Embeddings, head,
positions, norms and biases take AdamW. Momentum is elementwise; the orthogonal matrix is a
function of the whole one, which is brought together from slices and tensor-parallel parts
(:mod:`megapipe.optim.rules.whole`) in the type in which Newton-Schulz runs.

The matrix of queries, keys and values is one; a gated MLP's [2, f, h] is two. Experts are matrices
each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapipe import update_rules
from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import Entry
from megapipe.optim.rules.elementwise import adam_step
from megapipe.optim.rules.rule import Rule, overlap, ranges
from megapipe.optim.rules.whole import gather_local, on_whole

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose slope at 0 is steep: singular values end up within about 0.7 to 1.2."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by."""


class Muon(Rule):
    """Muon; exp_avg is the momentum of matrices too, exp_avg_sq is used by AdamW alone."""

    declaration = update_rules.MUON

    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        adamw_lr = lr * self.config.adamw_lr_scale
        for shard in shards:
            others = ranges(shard, lambda spec: not is_hidden_matrix(spec))
            for part in self.parts(shard, others):
                adam_step(self.kernel, part, adamw_lr, count, self.config, decoupled=True)
            matrices = [e for e in shard.bucket.entries if is_hidden_matrix(e.spec)]
            if matrices:
                self._step_matrices(shard, matrices, lr)

    def _step_matrices(self, shard: Shard, matrices: Sequence[Entry], lr: float) -> None:
        self._add_momentum(shard)
        narrow = shard.grad.dtype if shard.grad.dtype == torch.float64 else torch.bfloat16
        own, regions = gather_local(shard.grad.to(narrow), matrices, shard.axis)
        regions = on_whole(regions, [entry.spec for entry in own], shard.tp, orthogonalise)
        for entry, region in zip(own, regions, strict=True):
            here = overlap(shard, entry)
            offset = shard.start + here.start - entry.start
            direction = shard.grad[here.start : here.stop]
            direction.copy_(region.reshape(-1)[offset : offset + len(direction)])
            adjusted = lr * self._adjustment(entry.spec.shape)
            for part in self.parts(shard, [here]):
                part.master.mul_(1.0 - lr * part.weight_decay).add_(part.grad, alpha=-adjusted)

    def _add_momentum(self, shard: Shard) -> None:
        """Replace the gradients of matrices by their (Nesterov) momentum, to be orthogonalised."""
        momentum = self.config.momentum
        for part in self.parts(shard, ranges(shard, is_hidden_matrix)):
            average = part.states[0].lerp_(part.grad, 1.0 - momentum)
            if self.config.nesterov:
                part.grad.lerp_(average, momentum)
            else:
                part.grad.copy_(average)

    def _adjustment(self, shape: Sequence[int]) -> float:
        """Factor of the learning rate of a matrix [..., rows, columns]."""
        rows, columns = shape[-2:]
        if self.config.muon_adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def is_hidden_matrix(spec: LocalParameter) -> bool:
    """Whether Muon takes the parameter: a weight matrix of a layer."""
    return spec.role == "matrix"


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each, roughly: [..., m, n] -> [..., m, n]."""
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    return torch.stack([_newton_schulz(matrix) for matrix in flat]).view_as(matrices)


def _newton_schulz(matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
