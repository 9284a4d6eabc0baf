"""Sizes and features of a model that decide which kernels it can use. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.ops.scores import PLAIN, ScoreModifiers


class AttentionNeeds(NamedTuple):
    """Sizes of attention on one tensor-parallel rank, for the choice of a kernel."""

    heads: int
    groups: int
    """Number of key and value heads on the rank."""
    head_dim: int
    dropout: float
    scores: ScoreModifiers = PLAIN
    """Score modifiers (scale, soft cap, ALiBi, window) that the kernel must support."""


class NormNeeds(NamedTuple):
    """Kind and sizes of a model's norms, for the choice of a kernel."""

    hidden: int
    eps: float
    centred: bool
    """Whether norms subtract the mean (LayerNorm); otherwise they are RMSNorms."""
    bias: bool
    offset: bool = False
    """Whether weights are zero-centred, i.e. stored as weight - 1."""


class KernelNeeds(NamedTuple):
    """Kernels that a model's stages call, except weight-gradient kernels."""

    attention: AttentionNeeds | None = None
    norm: NormNeeds | None = None
    gate: bool = False
    """Whether stages call the SwiGLU kernel."""
    rotary: bool = False
    loss: bool = False
    """Whether the last stage computes the loss in loss chunks."""
    experts: tuple[int, ...] = ()
    """Input and output widths of the experts' grouped GEMMs; empty without experts."""
