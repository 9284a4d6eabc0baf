"""Memory of attention that is written out (:mod:`megapipe.ops.explicit_attention`), as it runs."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.model.tape import Tape
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
        one = _Heads(scores, rows, queries, keys, per_group, head_dim, size, masked)
        return Explicit(one.forward(), one.backward())


class _Heads:
    """The query heads of one key/value head: all that is in memory at once."""

    def __init__(
        self,
        scores: Scores,
        rows: int,
        queries: int,
        keys: int,
        heads: int,
        head_dim: int,
        size: int,
        masked: bool,
    ) -> None:
        high = max(size, 4)
        pairs = queries * keys
        self.numbers = heads * rows * queries * high
        """One for each query [b, n * s, 1]."""
        self.of_queries = self.numbers * head_dim  # [b, n * s, d]
        self.of_keys = rows * keys * head_dim * high  # [b, t, d]
        self.scores = self.numbers * keys  # [b, n * s, t]
        self.seen = pairs if masked else 0  # [s, t], bool
        self.alibi = 0 if scores.slopes is None else (heads + 1) * pairs * high  # [n, s, t], [s, t]
        self.slope = 0 if scores.softcap is None else self.scores
        is_narrow, is_joined = size < high, heads > 1
        self.copied = self.of_queries if is_narrow or is_joined else 0
        self.joined = self.of_queries * size // high if is_narrow and is_joined else 0
        """A copy that lasts until it is copied into the wider type."""
        self.wide_keys = 2 * self.of_keys if is_narrow else 0
        self.joined_numbers = self.numbers if is_joined else 0

    def forward(self) -> int:
        tape = self._begun()
        self._scores(tape, slope=0)
        tape.take(2 * self.numbers, self.of_queries)
        return tape.peak

    def backward(self) -> int:
        tape = self._begun()
        for _ in ("gradient", "output"):
            tape.pass_by(self.joined, self.copied)
            tape.take(self.copied)
        tape.take(self.joined_numbers)
        self._scores(tape, self.slope)
        tape.take(self.of_keys)  # the value's gradient
        tape.pass_by(self.of_queries)
        tape.take(self.numbers, self.scores)
        tape.drop(self.scores)
        tape.take(self.of_queries, self.of_keys)
        return tape.peak

    def _begun(self) -> Tape:
        """Which keys are seen, and queries, keys and values in the type of the scores."""
        tape = Tape(self.seen + self.wide_keys)
        tape.pass_by(self.joined, self.copied)
        tape.take(self.copied)
        return tape

    def _scores(self, tape: Tape, slope: int) -> None:
        tape.take(self.scores, slope)
        tape.pass_by(max(self.alibi, self.seen))
