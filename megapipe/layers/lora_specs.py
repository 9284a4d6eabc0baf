"""Low-rank adapters as the plan and checkpoints see them (LoRA; Hu et al., 2106.09685).

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from megapipe.config.lora import LoraConfig
from megapipe.layers.specs import ParameterSpec


class Lora(NamedTuple):
    """The adapters of every block."""

    rank: int
    scale: float
    """Of the product of an adapter's matrices, before it is added."""
    targets: tuple[str, ...]
    """Linear layers, or parts of them, that have an adapter, by the family's names."""

    @classmethod
    def of(cls, config: LoraConfig) -> Lora | None:
        """Return the adapters that `lora.*` asks for, if any; its `targets` are to be resolved."""
        if config.rank is None:
            return None
        scale = config.alpha / (sqrt(config.rank) if config.rslora else config.rank)
        return cls(config.rank, scale, tuple(config.targets))


class RowSlice(NamedTuple):
    """Rows of a matrix [out, in] that an adapter adds to.

    The rows are seen as [groups, parts, width]: those of some consecutive parts of each group. The
    size that tensor parallelism splits is given as -1.
    """

    shape: tuple[int, int, int]
    start: int
    stop: int

    def count(self, out: int) -> int:
        """How many they are of `out`."""
        return out // self.shape[1] * (self.stop - self.start)


ALL_ROWS = RowSlice((1, 1, -1), 0, 1)


def adapter(
    name: str, rank: int, inputs: int, outputs: int, *, column: bool
) -> Iterator[ParameterSpec]:
    """The matrices A [rank, inputs] and B [outputs, rank] of an adapter.

    A is drawn uniformly as peft draws it (He et al., 1502.01852, with a slope of sqrt(5)), B is 0.
    Beside a layer whose rows are split over tp (`column`) so is B, and every rank holds A; beside
    one whose columns are split so is A, and every rank holds B.
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
