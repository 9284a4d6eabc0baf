"""Routing and parameters of an MoE layer, independent of any layout. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Literal

from megapipe.layers.specs import ParameterSpec

if TYPE_CHECKING:
    from megapipe.layers.moe.routers import Router

Drop = Literal["choice", "position", "score"]
Scope = Literal["sequence", "microbatch", "step"]
Codec = Literal["none", "bf16", "int8"]
"""Wire type of dispatched rows (:mod:`megapipe.layers.moe.row_codec`)."""
NUM_STATS = 4
"""Number of routing statistics before the choices of each expert: number of tokens, sums of
auxiliary loss and z-loss, number of dropped choices."""


@dataclass(frozen=True)
class Routing:
    """Settings of routing: choice of experts, weights of choices, and terms of the loss."""

    experts: int
    top_k: int
    scores: str = "softmax"
    """Name of the router: ``model.moe.score_function``."""
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    capacity: float | None = None
    drop: Drop = "choice"
    aux_loss_coeff: float = 0.0
    scope: Scope = "sequence"
    """Tokens over which the auxiliary loss counts: each sequence, each micro-batch, or the global
    batch. For the global batch it uses the choices of the last step that had an update."""
    first_only: bool = False
    """Whether the auxiliary loss counts only first choices."""
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    """Jitter j: in training the router's input is multiplied by factors from 1 - j to 1 + j."""
    random_second: bool = False
    """Whether training keeps the second of two choices with a probability of twice its weight."""
    has_expert_bias: bool = False
    """Whether each expert has a bias that is added to its score when experts are chosen."""

    @cached_property
    def router(self) -> Router:
        """Router that :attr:`scores` names. Loads torch. Raises :class:`ConfigError` if a
        user-defined router fails to load."""
        from megapipe.layers.moe.routers import make_router

        return make_router(self.scores)

    def expert_capacity(self, length: int) -> int | None:
        """Return the maximum number of a sequence's tokens that an expert takes; None: no limit."""
        if self.capacity is None:
            return None
        return ceil(Fraction(str(self.capacity)) * self.top_k * length / self.experts)

    @property
    def reports_first_choices(self) -> bool:
        """Whether a layer also reports first choices, because the next step's auxiliary loss counts
        only first choices."""
        return self.scope == "step" and self.first_only

    @property
    def num_stats(self) -> int:
        """Number of routing statistics of a layer."""
        return NUM_STATS + self.experts * (1 + self.reports_first_choices)


def wire_bytes(codec: str, width: int, size: int) -> int:
    """Return a row's bytes on the wire: `width` values, each of `size` bytes if not encoded."""
    return {"none": width * size, "bf16": width * 2, "int8": width + 4}[codec]


def bias_name(layer: int) -> str:
    """Return the checkpoint name of a layer's expert biases, [experts]."""
    return f"model/layers.{layer}.moe.router.bias"


def counts_name(layer: int, first_only: bool) -> str:
    """Return the checkpoint name of the previous step's choices (or first choices) per expert."""
    return f"routing/layers.{layer}.moe.router.{'first_' if first_only else ''}counts"


def replica_counts_name(layer: int) -> str:
    """Return the checkpoint name of the choices per expert that determined the replicas."""
    return f"routing/layers.{layer}.moe.copies.counts"


def padded_rows(routing: Routing, tokens: int, sequences: int, length: int) -> int:
    """Return the number of padded rows of all experts on a rank that has `tokens` tokens of
    `sequences` sequences, each of length `length`."""
    capacity = routing.expert_capacity(length)
    assert capacity is not None, "checked"
    return routing.experts * sequences * min(capacity, tokens // sequences)


def most_imbalance(routing: Routing, ep: int) -> Fraction:
    """Return the largest possible ratio of a rank's rows to the mean over ranks."""
    return Fraction(ep * min(routing.top_k, routing.experts // ep), routing.top_k)


def expert_matrices(
    name: str, shape: tuple[int, ...], *, bias: bool, std: float, inner_dim: int
) -> Iterator[ParameterSpec]:
    """Yield the weight [experts, (2,) out, in] and the bias of one linear layer of all experts.
    `inner_dim` is the weight's dimension that has the experts' FFN hidden size."""
    yield ParameterSpec(
        name=f"{name}.weight",
        shape=shape,
        role="matrix",
        inner_dim=inner_dim,
        decay=True,
        std=std,
        over_ep=True,
    )
    if bias:
        inner = inner_dim if inner_dim < len(shape) - 1 else None
        yield ParameterSpec(name=f"{name}.bias", shape=shape[:-1], inner_dim=inner, over_ep=True)


def of_tokens(name: str, shape: tuple[int, ...], std: float) -> ParameterSpec:
    """Return the spec of a matrix that every tp rank holds whole and applies to local positions."""
    return ParameterSpec(
        name=name, shape=shape, role="matrix", decay=True, std=std, sequence_partial=True
    )
