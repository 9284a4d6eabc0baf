"""Specs of parameters, free of any layout: layers are made of them, and the plan reads them.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from megapipe.layers.policy import VOCAB_MULTIPLE

Role = Literal["matrix", "embedding", "head", "vector"]
"""A matrix of a hidden layer, a table of vectors, the last matrix, or a vector."""


@dataclass(frozen=True)
class JoinedHeads:
    """How the heads of several matrices are joined in the rows of one: group by group, `heads[i]`
    heads of matrix i after those of matrix i - 1, each head `size` rows."""

    heads: tuple[int, ...]
    size: int

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return sum(self.heads) * self.size


@dataclass
class InitialValues:
    """Initial values of a global tensor, held until they are copied into the buffers."""

    tensor: Any

    def release(self) -> None:
        """Free the values."""
        self.tensor = None


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A global tensor: the only place that says how it is split, initialised and updated."""

    name: str
    """As checkpoints have it, free of any layout."""
    shape: tuple[int, ...]
    """Linear weights are [out, in], or [k, out, in]: k matrices applied as one."""
    role: Role = "vector"
    joined: JoinedHeads | None = None
    """The matrices that this one consists of, if there are several (queries, keys, values)."""
    split_dim: int | None = None
    """The dimension split over tp; None: every tp rank holds all of it."""
    multiple: int = 1
    """Each tp rank's length of `split_dim` is padded to a multiple of this; 1: tp divides it."""
    decay: bool = False
    """Weight decay applies to it."""
    std: float | None = None
    """Standard deviation of the initial values; None: all are `fill`."""
    bound: float | None = None
    """The initial values are uniform between -bound and bound, instead."""
    fill: float = 0.0
    sequence_partial: bool = False
    """Where activations are split by sequence, a rank's gradient covers its positions only: it is
    summed over tp."""
    heads_partial: bool = False
    """A rank's gradient covers its heads only: it is summed over tp."""
    grad_by_autograd: bool = False
    """Autograd itself computes the gradient, within ``I``; the others' are queued for ``W``."""
    inner_dim: int | None = None
    """Of what is split over ep, the dimension split over etp; None: every rank of etp holds all."""
    over_ep: bool = False
    """Its first dimension, each index of which is a tensor by itself, is split over ep. Gradients
    are summed over all ranks with the same indices, whichever tokens they have, tp ranks among
    them."""
    tied: bool = False
    """Another stage may use the same tensor: gradients of all uses are added."""
    use: int = 0
    """Which use of a tied tensor this is: 0 the input embedding, 1 the head."""
    frozen: bool = False
    """It stays as it is loaded: it has no gradient, no optimizer state and no master copy."""
    initial: InitialValues | None = field(default=None, compare=False, repr=False)
    """Given initial values, which go before `std` and `fill`."""

    @property
    def split(self) -> bool:
        """Whether tp ranks, or those of etp, hold different parts."""
        return self.split_dim is not None or self.inner_dim is not None

    @property
    def is_matmul(self) -> bool:
        """Whether the gradient is a product of matrices; that of an embedding adds up rows."""
        return self.role in ("matrix", "head")

    def local_shape(self, tp: int, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
        """The shape of one rank's region, padding included."""
        local = list(self.shape)
        if self.over_ep:
            assert local[0] % ep == 0, f"{self.name}: {local[0]} over ep {ep}"
            local[0] //= ep
        if self.inner_dim is not None:
            assert local[self.inner_dim] % etp == 0, f"{self.name}: {self.shape} over etp {etp}"
            local[self.inner_dim] //= etp
        if self.split_dim is not None:
            length = self.shape[self.split_dim]
            assert self.multiple > 1 or length % tp == 0, f"{self.name}: {length} over tp {tp}"
            share = -(-length // tp)
            local[self.split_dim] = -(-share // self.multiple) * self.multiple
        return tuple(local)

    def local_numel(self, tp: int, ep: int = 1, etp: int = 1) -> int:
        """Values of one rank's region, padding included."""
        return prod(self.local_shape(tp, ep, etp))


def column_linear(
    name: str,
    shape: tuple[int, ...],
    *,
    bias: bool,
    std: float,
    joined: JoinedHeads | None = None,
) -> Iterator[ParameterSpec]:
    """Weight and bias of a linear layer whose outputs are split over tp."""
    split = len(shape) - 2
    yield _matrix(f"{name}.weight", shape, split, std, joined)
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=shape[:-1], split_dim=split)


def row_linear(
    name: str, shape: tuple[int, ...], *, bias: bool, std: float
) -> Iterator[ParameterSpec]:
    """Weight and bias of a linear layer whose inputs are split over tp."""
    yield _matrix(f"{name}.weight", shape, len(shape) - 1, std)
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=shape[:-1], sequence_partial=True)


def norm(name: str, hidden: int, *, bias: bool, fill: float = 1.0) -> Iterator[ParameterSpec]:
    """Weight, at first `fill`, and bias of a norm, which every tp rank holds."""
    for own, first in (("weight", fill), *([("bias", 0.0)] if bias else [])):
        yield ParameterSpec(
            name=f"{name}.{own}",
            shape=(hidden,),
            fill=first,
            sequence_partial=True,
            grad_by_autograd=True,
        )


def head_norm(name: str, head_dim: int, fill: float = 1.0) -> ParameterSpec:
    """Weight of an rmsnorm over each of a tp rank's heads, which every tp rank holds."""
    return ParameterSpec(
        name=f"{name}.weight",
        shape=(head_dim,),
        fill=fill,
        heads_partial=True,
        grad_by_autograd=True,
    )


def vocabulary(
    name: str,
    size: int,
    hidden: int,
    *,
    role: Literal["embedding", "head"],
    std: float,
    tied: bool = False,
) -> ParameterSpec:
    """A matrix with a row for each token id, split over tp. Where it is `tied`, embedding and head
    are the first and the second use of one tensor."""
    return ParameterSpec(
        name=name,
        shape=(size, hidden),
        role=role,
        split_dim=0,
        multiple=VOCAB_MULTIPLE,
        decay=True,
        std=std,
        tied=tied,
        use=int(tied and role == "head"),
    )


def positions(name: str, length: int, hidden: int, *, std: float) -> ParameterSpec:
    """A table of one vector for each position, which every tp rank holds."""
    return ParameterSpec(
        name=name,
        shape=(length, hidden),
        role="embedding",
        decay=True,
        std=std,
        sequence_partial=True,
    )


def _matrix(
    name: str,
    shape: tuple[int, ...],
    split_dim: int,
    std: float,
    joined: JoinedHeads | None = None,
) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=shape,
        role="matrix",
        joined=joined,
        split_dim=split_dim,
        decay=True,
        std=std,
    )


def by_name(parameters: Iterable[ParameterSpec]) -> dict[str, ParameterSpec]:
    """The parameters by name, the first use of each."""
    named: dict[str, ParameterSpec] = {}
    for spec in parameters:
        named.setdefault(spec.name, spec)
    return named


def local_numel_total(
    parameters: Iterable[ParameterSpec], tp: int, ep: int = 1, etp: int = 1
) -> int:
    """Values that one rank keeps, padding included; a tied matrix once."""
    return sum(spec.local_numel(tp, ep, etp) for spec in by_name(parameters).values())
