"""Memory of attention while it runs, where no kernel does it in one go.

That is torch's on the CPU with dropout: it makes all scores, as several arrays, at least in fp32,
and keeps three of them for the backward.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.dtypes import DTYPE_BYTES
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.saved import Widths
from megapipe.model.interface import Sizes


class Unfused(NamedTuple):
    """Bytes: the most at once, its output among them, on top of the copies."""

    copies: int
    """Of queries, keys and values that lie between those of other heads; gone after its output
    layer."""
    forward: int
    """With what it saves."""
    without_graph: int
    """Saving nothing."""
    backward: int
    """Besides what was saved, and the gradient that it is given."""
    from_host: int
    """The same where what was saved is on the host, but for the mask of what was dropped."""

    @staticmethod
    def of(model: ModelConfig, sizes: Sizes, saved: int) -> Unfused | None:
        """Of one block; `saved` is what it keeps of its own. None where one kernel does it."""
        if sizes.cuda or not model.dropout:
            return None
        size, high = DTYPE_BYTES[model.dtype], max(DTYPE_BYTES[model.dtype], 4)
        w = Widths.of(model, sizes)
        is_grouped, is_narrow = model.kv_heads != model.heads, size < high
        queries = w.tokens * w.queries * high
        each_keys = sizes.attended * sizes.rows * w.queries * high  # copied for every query head
        keys = sizes.attended * sizes.rows * w.keys * high  # in fp32 where they are narrower
        scores = w.tokens * w.heads * sizes.attended * high
        causal = sizes.sequence * sizes.attended * high
        narrow_scores = scores * size // high
        lies_between = is_grouped and w.groups > 1
        repeated = is_grouped * each_keys
        return Unfused(
            copies=lies_between * w.tokens * (w.queries + 2 * w.keys) * size,
            forward=saved
            + w.tokens * w.queries * size
            + causal
            + repeated
            + is_narrow * (2 * queries + narrow_scores + keys * (1 + is_grouped)),
            without_graph=3 * scores
            + causal
            + queries
            + 2 * repeated
            + is_narrow * (queries + 2 * keys),
            backward=scores + each_keys + queries,
            from_host=2 * scores + each_keys * (1 + (is_grouped or is_narrow)) + queries,
        )
