"""Memory of attention while it runs, where no fused kernel does it.

That is torch's attention on the CPU with dropout: it computes all scores, as several arrays, at
least in fp32, and keeps three of them for the backward.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.dtypes import DTYPE_BYTES
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.saved import Widths
from megapipe.model.interface import Sizes


class Unfused(NamedTuple):
    """The most bytes of unfused attention at once, its output included, on top of `copies`."""

    copies: int
    """Copies of queries, keys and values that lie between those of other heads; freed after the
    output layer."""
    forward: int
    """In a forward, with the tensors that it saves."""
    without_graph: int
    """In a forward that saves nothing."""
    backward: int
    """In the backward, besides the saved tensors and the gradient of the output."""
    from_host: int
    """In the backward, where the saved tensors but the dropout mask come from host memory."""

    @staticmethod
    def of(model: ModelConfig, sizes: Sizes, saved: int) -> Unfused | None:
        """The bytes of one block, whose attention saves `saved`; None where a fused kernel runs."""
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
        widened = w.tokens * w.queries * (high - size)  # the gradient of the output
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
            backward=scores + each_keys + widened,
            from_host=2 * scores + each_keys * (1 + (is_grouped or is_narrow)) + widened,
        )
