"""Memory of attention that is written out (:mod:`megapipe.ops.explicit_attention`), as it runs."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.dtypes import DTYPE_BYTES
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.saved import Widths
from megapipe.model.gpt.scores import scores_of
from megapipe.model.interface import Sizes


class Explicit(NamedTuple):
    """The most bytes at once, besides inputs, outputs and what is saved."""

    forward: int
    backward: int

    @staticmethod
    def of(model: ModelConfig, sizes: Sizes) -> Explicit:
        """Those of one block, of the layers that have a window if some have; nothing where a kernel
        of torch computes it."""
        scores = scores_of(model, 0, 0, sizes.tp)._replace(window=model.window)
        scores = scores.among(sizes.attended)
        if sizes.cuda or scores.plain:
            return Explicit(0, 0)
        w, size = Widths.of(model, sizes), DTYPE_BYTES[model.dtype]
        high, per_group = max(size, 4), w.heads // w.groups
        head_dim = w.queries // w.heads
        seen = sizes.sequence * sizes.attended  # [s, t], bool
        one = per_group * w.tokens * sizes.attended * high  # [b, n * s, t]
        queries = per_group * w.tokens * head_dim * high  # [b, n * s, d]
        keys = sizes.attended * sizes.rows * head_dim * high  # [b, t, d]
        copied = queries + (2 * keys if size < high else 0)
        alibi = 0
        if scores.slopes is not None:
            alibi = one // sizes.rows + 2 * seen * high
        capped = one if scores.softcap is not None else 0
        return Explicit(
            forward=2 * seen + copied + one + max(alibi, queries),
            backward=2 * seen + copied + 2 * queries + one + capped + max(alibi, one + keys),
        )
