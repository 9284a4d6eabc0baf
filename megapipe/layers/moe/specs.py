"""A mixture of experts free of any layout: its routing and its parameters. No torch."""

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
"""How rows that travel to experts look on the wire (:mod:`megapipe.layers.moe.row_codec`)."""
NUM_STATS = 4
"""Numbers that a layer tells of its routing before the choices of each expert: tokens, the sums of
their balance and z terms, and choices dropped."""


@dataclass(frozen=True)
class Routing:
    """Experts of a token, their weights, and the terms that the loss gets."""

    experts: int
    top_k: int
    scores: str = "softmax"
    """Name of the router: ``model.moe.scores``."""
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    capacity: float | None = None
    drop: Drop = "choice"
    aux_loss_coeff: float = 0.0
    scope: Scope = "sequence"
    """The balance term is taken over each sequence, each micro-batch, or all of the global batch
    with the choices of the last step that had an update."""
    first_only: bool = False
    """It counts first choices alone."""
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    """In training the router's input is multiplied by factors between 1 - this and 1 + this."""
    random_second: bool = False
    """In training the second of two choices is kept with the probability of twice its share."""
    has_expert_bias: bool = False
    """Each expert has a bias that is added to its score where experts are chosen."""

    @cached_property
    def router(self) -> Router:
        """The router itself. Loads torch; raises :class:`ConfigError` where it is user-defined and
        cannot be had."""
        from megapipe.layers.moe.routers import make_router

        return make_router(self.scores)

    def expert_capacity(self, length: int) -> int | None:
        """Tokens of a sequence that an expert takes at most; None: all."""
        if self.capacity is None:
            return None
        return ceil(Fraction(str(self.capacity)) * self.top_k * length / self.experts)

    @property
    def reports_first_choices(self) -> bool:
        """Whether a layer tells first choices beside all, as the next step's balance term counts
        these alone."""
        return self.scope == "step" and self.first_only

    @property
    def num_stats(self) -> int:
        """Numbers that a layer tells of its routing."""
        return NUM_STATS + self.experts * (1 + self.reports_first_choices)


def wire_bytes(codec: str, width: int, size: int) -> int:
    """Bytes of a row of so many values on the wire, each of `size` where it is not coded."""
    return {"none": width * size, "bf16": width * 2, "int8": width + 4}[codec]


def bias_name(layer: int) -> str:
    """Name of the biases of a layer's experts, as checkpoints have it; [experts]."""
    return f"model/layers.{layer}.moe.router.bias"


def counts_name(layer: int, first_only: bool) -> str:
    """Name of the choices of the last step of a layer's experts, likewise, or of the first ones."""
    return f"routing/layers.{layer}.moe.router.{'first_' if first_only else ''}counts"


def replica_counts_name(layer: int) -> str:
    """Name of the choices by which copies of a layer's experts were chosen, likewise."""
    return f"routing/layers.{layer}.moe.copies.counts"


def padded_rows(routing: Routing, tokens: int, sequences: int, length: int) -> int:
    """Rows of all experts that a rank has room for, of `tokens` of so many sequences of that
    length."""
    places = routing.expert_capacity(length)
    assert places is not None, "checked"
    return routing.experts * sequences * min(places, tokens // sequences)


def most_imbalance(routing: Routing, ep: int) -> Fraction:
    """The most rows that a rank's experts can get by the mean, as a token chooses each once."""
    return Fraction(ep * min(routing.top_k, routing.experts // ep), routing.top_k)


def expert_matrices(
    name: str, shape: tuple[int, ...], *, bias: bool, std: float, inner_dim: int
) -> Iterator[ParameterSpec]:
    """Weight [experts, (2,) out, in] and bias of one linear layer of each expert, whose inner width
    is the dimension `inner_dim`."""
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
    """A matrix that every tp rank holds whole, and applies to the positions that it has."""
    return ParameterSpec(
        name=name, shape=shape, role="matrix", decay=True, std=std, sequence_partial=True
    )
