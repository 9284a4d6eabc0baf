"""Muon: orthogonalised momentum, for the matrices of the layers (Jordan et al., 2024).

https://kellerjordan.github.io/posts/muon; ``torch.optim.Muon`` is the reference. Embeddings, head,
positions, norms and biases use AdamW. Momentum is elementwise. Orthogonalising needs the whole
matrix, which is assembled from shards and tensor-parallel parts
(:mod:`megapipe.optim.rules.full_matrices`) in the type in which Newton-Schulz runs.

The fused matrix of queries, keys and values is orthogonalised as three matrices, unless
``split_qkv`` says otherwise. Gate and up of a gated MLP ([2, f, h]) and the matrices of each expert
are orthogonalised separately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapipe.config import update_rules
from megapipe.layers.parameter import LocalParameter
from megapipe.layers.specs import JoinedHeads, ParameterSpec
from megapipe.optim.buffers import ParamRange
from megapipe.optim.rules.elementwise import adam_step
from megapipe.optim.rules.full_matrices import apply_to_full_matrices, gather_local
from megapipe.optim.rules.rule import Rule, overlap, ranges

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a polynomial of degree 5, steep at 0: singular values become about 0.7 to 1.2."""
ITERATIONS = 5
EPS = 1e-7
"""Smallest norm by which a matrix is divided."""


class Muon(Rule):
    """Muon. State exp_avg is the momentum of matrices and AdamW's; exp_avg_sq is only AdamW's."""

    declaration = update_rules.MUON
    options: update_rules.MuonOptions

    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        adamw_lr = lr * self.options.adamw_lr_scale
        for shard in shards:
            others = ranges(shard, lambda spec: not is_hidden_matrix(spec))
            for part in self.parts(shard, others):
                adam_step(self.kernel, part, adamw_lr, count, self.options, decoupled=True)
            matrices = [e for e in shard.bucket.entries if is_hidden_matrix(e.spec)]
            if matrices:
                self._step_matrices(shard, matrices, lr)

    def _step_matrices(self, shard: Shard, matrices: Sequence[ParamRange], lr: float) -> None:
        self._add_momentum(shard)
        narrow = shard.grad.dtype if shard.grad.dtype == torch.float64 else torch.bfloat16
        own, regions = gather_local(shard.grad.to(narrow), matrices, shard.axis)
        regions = apply_to_full_matrices(
            regions, [entry.spec for entry in own], shard.tp, self._orthogonal
        )
        for entry, region in zip(own, regions, strict=True):
            here = overlap(shard, entry)
            offset = shard.start + here.start - entry.start
            direction = shard.grad[here.start : here.stop]
            adjusted = lr
            factors = self._factors(entry.spec)
            if isinstance(factors, float):
                adjusted *= factors
            else:
                region = region.to(direction.dtype) * factors.to(direction)
            direction.copy_(region.reshape(-1)[offset : offset + len(direction)])
            for part in self.parts(shard, [here]):
                part.master.mul_(1.0 - lr * part.weight_decay).add_(part.grad, alpha=-adjusted)

    def _add_momentum(self, shard: Shard) -> None:
        """Replace the gradients of matrices by their (Nesterov) momentum, to be orthogonalised."""
        momentum = self.options.momentum
        for part in self.parts(shard, ranges(shard, is_hidden_matrix)):
            average = part.states[0].lerp_(part.grad, 1.0 - momentum)
            if self.options.nesterov:
                part.grad.lerp_(average, momentum)
            else:
                part.grad.copy_(average)

    def _orthogonal(self, whole: Tensor, spec: LocalParameter) -> Tensor:
        """Orthogonalise each matrix of `whole` separately."""
        joined = self._joined(spec)
        if joined is None:
            return orthogonalise(whole)
        groups = whole.view(-1, sum(joined.heads), joined.size, whole.shape[-1])
        if self.options.split_qkv == "heads":
            return orthogonalise(groups).view_as(whole)
        parts = [
            orthogonalise(part.reshape(-1, whole.shape[-1])).view_as(part)
            for part in groups.split(joined.heads, dim=1)
        ]
        return torch.cat(parts, dim=1).view_as(whole)

    def _joined(self, spec: ParameterSpec) -> JoinedHeads | None:
        """Return the order of the heads in a fused QKV matrix; None for a matrix that is
        orthogonalised as one."""
        return None if self.options.split_qkv == "none" else spec.joined

    def _factors(self, spec: LocalParameter) -> float | Tensor:
        """Return the factor of a matrix's learning rate; or, if queries, keys and values differ,
        the factors of this rank's rows: [rows, 1]."""
        columns, joined = spec.shape[-1], self._joined(spec)
        if joined is None:
            return self._factor(spec.shape[-2], columns)
        if self.options.split_qkv == "heads":
            return self._factor(joined.size, columns)
        groups = spec.shape[0] // joined.rows
        lengths = [heads * joined.size for heads in joined.heads]
        of_group = [self._factor(groups * n, columns) for n in lengths for _ in range(n)]
        if len(set(of_group)) == 1:
            return of_group[0]
        rows = torch.tensor(of_group, dtype=torch.float64)
        return rows.repeat(spec.sizes[0] // joined.rows).unsqueeze(1)

    def _factor(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate of a matrix [rows, columns]."""
        if self.options.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def is_hidden_matrix(spec: LocalParameter) -> bool:
    """Whether Muon updates the parameter: a weight matrix of a layer."""
    return spec.role == "matrix"


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return roughly the (semi-)orthogonal matrix nearest to each [..., m, n], same shape."""
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
