"""How attention scores are computed from queries and keys. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class ScoreModifiers(NamedTuple):
    """Options that change attention scores, besides the causal mask; none by default."""

    scale: float | None = None
    """Factor of the products of queries and keys; default: 1 / sqrt(d)."""
    softcap: float | None = None
    """Soft cap: a score x becomes softcap * tanh(x / softcap) (Gemma 2, 2408.00118)."""
    slopes: tuple[float, ...] | None = None
    """ALiBi slopes of the local heads: a score is reduced by the slope times the distance of query
    and key (2108.12409)."""
    window: int | None = None
    """Sliding window: positions that a position sees, itself included (Longformer, 2004.05150)."""

    @property
    def plain(self) -> bool:
        """Whether scores are only products of queries and keys times a scale."""
        return self.softcap is None and self.slopes is None and self.window is None

    def of_heads(self, index: int, parts: int) -> ScoreModifiers:
        """Return the modifiers for part `index` of `parts` equal parts of the heads."""
        if self.slopes is None:
            return self
        size = len(self.slopes) // parts
        return self._replace(slopes=self.slopes[index * size : (index + 1) * size])

    def among(self, length: int) -> ScoreModifiers:
        """Drop the window if it covers all `length` keys; return the rest unchanged."""
        if self.window is None or self.window < length:
            return self
        return self._replace(window=None)


PLAIN = ScoreModifiers()


def visible_scores(length: int, window: int | None) -> int:
    """Return the number of scores of `length` positions that attend to themselves and to earlier
    positions, at most `window` in all; None: to all earlier positions."""
    full = min(length, window or length)  # the first positions see fewer
    return full * (full + 1) // 2 + (length - full) * full


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes (Press et al., 2108.12409): 2**(-8 i / n) for head i in 1 .. n.

    n is the largest power of two up to `heads`; further heads have every other slope for 2n heads.
    """
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return (*first, *between)
