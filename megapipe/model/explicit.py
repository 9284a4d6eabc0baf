"""Memory of attention that is written out (:mod:`megapipe.ops.explicit_attention`), as it runs."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.ops.scores import Scores


class Explicit(NamedTuple):
    """The most bytes at once, besides inputs, outputs and what is saved."""

    forward: int = 0
    backward: int = 0

    @staticmethod
    def of(
        scores: Scores,
        *,
        rows: int,
        queries: int,
        keys: int,
        per_group: int,
        head_dim: int,
        size: int,
        masked: bool = True,
    ) -> Explicit:
        """Those of `rows` samples, of `queries` positions that attend to `keys` positions, with
        `per_group` query heads for each of the keys'; values of `size` bytes. `masked`: some keys
        are hidden."""
        high = max(size, 4)
        pairs = queries * keys
        seen = 2 * pairs if masked else 0  # [s, t], bool, and its opposite
        one = per_group * rows * pairs * high  # [b, n * s, t]
        of_queries = per_group * rows * queries * head_dim * high  # [b, n * s, d]
        of_keys = rows * keys * head_dim * high  # [b, t, d]
        copied = of_queries + (2 * of_keys if size < high else 0)
        alibi = 0 if scores.slopes is None else (per_group + 1) * pairs * high
        capped = 0 if scores.softcap is None else one
        held = seen + copied + one
        return Explicit(
            forward=held + max(alibi, of_queries),
            backward=held + 2 * of_queries + capped + max(alibi, one + of_keys),
        )
