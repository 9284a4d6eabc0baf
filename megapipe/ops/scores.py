"""How the scores of attention are made of queries and keys. No torch."""

from __future__ import annotations

from typing import NamedTuple


class ScoreModifiers(NamedTuple):
    """Changes of attention besides hiding later positions; without arguments none."""

    scale: float | None = None
    """Factor of the products of queries and keys; default: 1 / sqrt(d)."""
    softcap: float | None = None
    """A score x becomes softcap * tanh(x / softcap) (Gemma 2, 2408.00118)."""
    slopes: tuple[float, ...] | None = None
    """Of each head here: what is taken from a score for each position that the key is before the
    query (ALiBi, 2108.12409)."""
    window: int | None = None
    """A position sees so many, the last of which is itself (Longformer, 2004.05150)."""

    @property
    def plain(self) -> bool:
        """Whether they are products with a scale."""
        return self.softcap is None and self.slopes is None and self.window is None

    def of_heads(self, index: int, parts: int) -> ScoreModifiers:
        """The same, of one of `parts` equal parts of the heads."""
        if self.slopes is None:
            return self
        size = len(self.slopes) // parts
        return self._replace(slopes=self.slopes[index * size : (index + 1) * size])

    def among(self, length: int) -> ScoreModifiers:
        """The same, of `length` keys, on which a window as long has no effect."""
        if self.window is None or self.window < length:
            return self
        return self._replace(window=None)


PLAIN = ScoreModifiers()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi (Press et al., 2108.12409): 2**(-8 i / n) of head i in 1 .. n.

    n is a power of two; where `heads` is none, further heads have every other slope of 2n.
    """
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return (*first, *between)
