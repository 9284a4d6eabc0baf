"""Requirements of a family's stages, of kernels, for the choice among them. No torch."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.ops.scores import PLAIN, ScoreModifiers


class AttentionNeeds(NamedTuple):
    """Attention of one tensor-parallel rank, for the choice of a kernel."""

    heads: int
    groups: int
    """Key and value heads."""
    head_dim: int
    dropout: float
    scores: ScoreModifiers = PLAIN
    """Of the layers that differ most from plain attention."""


class NormNeeds(NamedTuple):
    """Norms, for the choice of a kernel."""

    hidden: int
    eps: float
    centred: bool
    """Layernorm; otherwise root mean square."""
    bias: bool
    offset: bool = False
    """The weight is a difference from 1."""


class KernelNeeds(NamedTuple):
    """The kernels that a family's stages call, besides weight gradients."""

    attention: AttentionNeeds | None = None
    norm: NormNeeds | None = None
    gate: bool = False
    """That of SwiGLU."""
    rotary: bool = False
    loss: bool = False
    """That of a loss in chunks."""
    experts: tuple[int, ...] = ()
    """Widths of the rows of products that experts have each their own matrix for."""
