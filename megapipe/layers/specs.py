"""Specs of parameters, free of any layout: layers are made from them, and the plan reads them.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from megapipe.layers.activation_policy import VOCAB_MULTIPLE

Role = Literal["matrix", "embedding", "head", "vector"]
"""Use of a tensor: matrix, table of vectors, output projection, or bias or norm weight."""


@dataclass(frozen=True)
class JoinedHeads:
    """Order of the heads in a fused matrix (QKV): each group has `heads[0]` heads of the first
    matrix, then `heads[1]` of the second, ...; a head has `size` rows."""

    heads: tuple[int, ...]
    size: int

    @property
    def rows(self) -> int:
        """Number of rows in a group."""
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
    """Description of a global tensor: how it is split, initialised and updated in every layout."""

    name: str
    """Name in checkpoints, independent of any layout."""
    shape: tuple[int, ...]
    """Global shape. Linear weights are [out, in], or [k, out, in]: k matrices applied as one."""
    role: Role = "vector"
    joined: JoinedHeads | None = None
    """Order of the heads, if the matrix is fused from several matrices (QKV)."""
    split_dim: int | None = None
    """Dimension split over tp; None: every tp rank holds the whole tensor."""
    multiple: int = 1
    """Multiple to which each tp rank's length of `split_dim` is padded; 1: no padding."""
    decay: bool = False
    """Whether weight decay applies to the tensor."""
    std: float | None = None
    """Standard deviation of the initial values; None: all are `fill`."""
    bound: float | None = None
    """Bound of uniform initial values, drawn from [-bound, bound]; None: not uniform."""
    fill: float = 0.0
    sequence_partial: bool = False
    """Whether a rank's gradient covers only local positions with sequence parallelism, and so is
    summed over tp."""
    heads_partial: bool = False
    """Whether a rank's gradient covers only local heads, and so is summed over tp."""
    grad_by_autograd: bool = False
    """Whether autograd computes the gradient within ``I``, instead of a task queued for ``W``."""
    inner_dim: int | None = None
    """Dimension of an expert tensor split over etp; None: every etp rank holds all of it."""
    over_ep: bool = False
    """Whether the first dimension (experts) is split over ep. Gradients are summed over
    all ranks with the same experts (tp ranks too), whichever tokens these ranks have."""
    tied: bool = False
    """Whether another stage may use the same tensor: gradients of all uses are added."""
    use: int = 0
    """Index of this use of a tied tensor: 0 the input embedding, 1 the head."""
    frozen: bool = False
    """Whether the tensor stays as loaded, without gradient, optimizer state and master weights."""
    initial: InitialValues | None = field(default=None, compare=False, repr=False)
    """Given initial values, which take precedence over `std` and `fill`."""

    @property
    def split(self) -> bool:
        """Whether ranks of tp or etp hold different parts."""
        return self.split_dim is not None or self.inner_dim is not None

    @property
    def is_matmul(self) -> bool:
        """Whether the gradient is a matrix product; an embedding's gradient is a sum of rows."""
        return self.role in ("matrix", "head")

    def local_shape(self, tp: int, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
        """Return the shape of one rank's region, padding included."""
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
        """Return the number of values of one rank's region, padding included."""
        return prod(self.local_shape(tp, ep, etp))


def column_linear(
    name: str,
    shape: tuple[int, ...],
    *,
    bias: bool,
    std: float,
    joined: JoinedHeads | None = None,
) -> Iterator[ParameterSpec]:
    """Yield weight and bias of a linear layer whose outputs are split over tp."""
    split = len(shape) - 2
    yield _matrix(f"{name}.weight", shape, split, std, joined)
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=shape[:-1], split_dim=split)


def row_linear(
    name: str, shape: tuple[int, ...], *, bias: bool, std: float
) -> Iterator[ParameterSpec]:
    """Yield weight and bias of a linear layer whose inputs are split over tp."""
    yield _matrix(f"{name}.weight", shape, len(shape) - 1, std)
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=shape[:-1], sequence_partial=True)


def norm(name: str, hidden: int, *, bias: bool, fill: float = 1.0) -> Iterator[ParameterSpec]:
    """Yield weight, initially `fill`, and bias of a norm; every tp rank holds both."""
    for own, first in (("weight", fill), *([("bias", 0.0)] if bias else [])):
        yield ParameterSpec(
            name=f"{name}.{own}",
            shape=(hidden,),
            fill=first,
            sequence_partial=True,
            grad_by_autograd=True,
        )


def head_norm(name: str, head_dim: int, fill: float = 1.0) -> ParameterSpec:
    """Return the weight of an RMSNorm over each head; every tp rank holds the whole weight."""
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
    """Return a matrix with a row for each token id, split over tp. If the matrix is `tied`,
    embedding and head are the first and the second use of one tensor."""
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
    """Return a table with one vector per position; every tp rank holds the whole table."""
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
    """Return the parameters by name. A tied parameter's entry is its first use."""
    named: dict[str, ParameterSpec] = {}
    for spec in parameters:
        named.setdefault(spec.name, spec)
    return named


def local_numel_total(
    parameters: Iterable[ParameterSpec], tp: int, ep: int = 1, etp: int = 1
) -> int:
    """Return the number of values that one rank holds, with padding; tied matrices count once."""
    return sum(spec.local_numel(tp, ep, etp) for spec in by_name(parameters).values())
