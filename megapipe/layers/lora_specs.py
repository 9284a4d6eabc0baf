"""Low-rank adapters as the plan and checkpoints see them (LoRA; Hu et al., 2106.09685).

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from megapipe.config.lora import LoraConfig
from megapipe.layers.specs import ParameterSpec


class Lora(NamedTuple):
    """Rank, scale and targets of the LoRA adapters, equal in every block."""

    rank: int
    scale: float
    """Factor of an adapter's output, before it is added to the layer's output."""
    targets: tuple[str, ...]
    """Names of the model's linear layers, or of parts of them, that have an adapter."""

    @classmethod
    def of(cls, config: LoraConfig) -> Lora | None:
        """Return the adapters that ``lora`` configures, or None. `targets` are as configured, not
        yet resolved to layers of the model."""
        if config.rank is None:
            return None
        scale = config.alpha / (sqrt(config.rank) if config.rslora else config.rank)
        return cls(config.rank, scale, tuple(config.targets))


class RowSlice(NamedTuple):
    """Rows of a matrix [out, in] that an adapter adds to, for example Q in a fused QKV.

    The rows are viewed as `shape`, [groups, parts, width]; the slice takes the parts from `start`
    up to `stop` (exclusive) of each group. The size that tensor parallelism splits is given as -1.
    """

    shape: tuple[int, int, int]
    start: int
    stop: int

    def count(self, out: int) -> int:
        """Return the number of selected rows in a matrix of `out` rows."""
        return out // self.shape[1] * (self.stop - self.start)


ALL_ROWS = RowSlice((1, 1, -1), 0, 1)


def adapter(
    name: str, rank: int, inputs: int, outputs: int, *, column: bool
) -> Iterator[ParameterSpec]:
    """Yield the matrices A [rank, inputs] and B [outputs, rank] of an adapter.

    Initially A is uniform as in peft (He et al., 1502.01852, with a slope of sqrt(5)), and B is 0.
    If tp splits the layer's rows (`column`), tp splits the rows of B, and every rank holds A. If tp
    splits the layer's columns, tp splits the columns of A, and every rank holds B.
    """
    yield ParameterSpec(
        name=f"{name}.lora_a",
        shape=(rank, inputs),
        role="matrix",
        split_dim=None if column else 1,
        decay=True,
        bound=inputs**-0.5,
        sequence_partial=column,
    )
    yield ParameterSpec(
        name=f"{name}.lora_b",
        shape=(outputs, rank),
        role="matrix",
        split_dim=0 if column else None,
        decay=True,
        sequence_partial=not column,
    )
