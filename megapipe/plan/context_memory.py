"""The most bytes that attention over split positions takes at once, on its way through a plan.

It replays what :mod:`megapipe.layers.ring_attention` allocates and lets go of: bundles on their
way, copies that are sent, sums in the type of accumulation, and the results of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.config import Config
from megapipe.context.entries import Entry, entries
from megapipe.context.packs import PADDING, most_together
from megapipe.context.plan import KINDS, UNDER_WAY, Kind, Message
from megapipe.context.positions import Positions
from megapipe.dtypes import DTYPE_BYTES
from megapipe.layout.context_plan import Pass
from megapipe.layout.layout import Layout
from megapipe.model.explicit import Explicit
from megapipe.model.tape import Tape
from megapipe.ops.scores import Scores
from megapipe.plan.context_traffic import Attention


def packs_documents(config: Config, layout: Layout) -> bool:
    """Whether a kernel may take the short documents of a block at once."""
    needs = layout.model.kernels.attention
    return (
        config.data.masks_documents
        and layout.device == "cuda"
        and config.model.dtype in ("bf16", "fp16")
        and config.kernels.attention in ("auto", "flash", "flash_attn")
        and needs is not None
        and needs.scores.plain
    )


def attention_workspace(
    layout: Layout, rows: int, length: int, start: int = 0, *, packs: bool = False
) -> tuple[int, int]:
    """Bytes at once in the attention of a layer, forward and backward, besides its inputs, output,
    LSE and gradients in the model's type: of the member of the ring that takes most.

    Of `rows` samples, or of slices of `length` positions that begin at `start` of those here.
    `packs`: :func:`packs_documents`.
    """
    needs, split = layout.model.kernels.attention, layout.split
    if needs is None or not layout.attends_by_blocks:
        return 0, 0
    if split.cp == 1 and not packs:
        if needs.scores.plain or layout.device == "cpu":  # there the model counts it
            return 0, 0
        return Explicit.of(
            needs.scores,
            rows=rows,
            queries=length,
            keys=start + length,
            per_group=needs.heads // needs.groups,
            head_dim=needs.head_dim,
            size=DTYPE_BYTES[layout.model.dtype],
        )
    tokens = rows * length
    own = Attention.of(split, layout.context, needs, layout.model.dtype, tokens)
    held = split.held(layout.slice_lengths, 0)
    begin, end = start * split.ulysses, (start + length) * split.ulysses
    queries = [block.rows(begin, end) for block in held.blocks]
    keys = [block.rows(0, end) for block in held.blocks]
    viewed = split.ulysses == 1 and needs.groups in (1, needs.heads)
    whole = _Whole(own, queries, keys, viewed, end / (end - begin), needs.scores, rows, packs)
    if split.cp == 1:
        return whole.packed(0, 0)
    members = range(split.ring)
    return (
        max(_Replay(whole, "F", member).peak() for member in members),
        max(_Replay(whole, "I", member).peak() for member in members),
    )


@dataclass(frozen=True)
class _Whole:
    """All that the members of a ring have in common."""

    own: Attention
    queries: Sequence[Positions]
    keys: Sequence[Positions]
    viewed: bool
    """Keys, and queries, are parts of a tensor, and copied before they are sent."""
    attended: float
    """Rows of keys for each of queries: more than 1 where earlier slices have some."""
    scores: Scores
    rows: int
    """Samples."""
    packs: bool
    """A kernel may take many rectangles of a block at once."""

    @property
    def q(self) -> int:
        return self.own.queries * self.own.size

    @property
    def k(self) -> int:
        return round(self.own.keys * self.own.size * self.attended)

    @property
    def wide_q(self) -> int:
        return self.own.queries * self.own.main

    @property
    def wide_k(self) -> int:
        return round(self.own.keys * self.own.main * self.attended)

    @property
    def widened(self) -> tuple[int, ...]:
        """Gradient and output in the type of accumulation, if that is another."""
        return (self.wide_q, self.wide_q) if self.own.main > self.own.size else ()

    def entries(self, i: int, j: int) -> tuple[Entry, ...]:
        return entries(self.queries[i], self.keys[j])

    def share(self, entry: Entry) -> tuple[float, float]:
        """The part of a block's queries and of its keys that an entry has."""
        q = (entry.queries.stop - entry.queries.start) / self.queries[0].count
        return q, (entry.keys.stop - entry.keys.start) / self.keys[0].count

    def packed(self, i: int, j: int) -> tuple[int, int]:
        """The most that a call for many rectangles takes, forward and backward, however long the
        documents are: copies of rows, results, and what it sets aside for each rectangle.

        Rows are copied but for those of one sample that follow each other. All rectangles here have
        half of the block's queries at most on either side; those that are not causal are one for
        each sample and entry, and the others follow each other, unless a longer one is between.
        """
        found = self.entries(i, j) if self.packs else ()
        queries, keys = self.queries[i].count, self.keys[j].count
        forward = backward = 0
        for causal in (True, False):
            kind = [entry.sizes for entry in found if entry.causal == causal]
            most_q, most_k = (
                (
                    sum(size if causal else min(size, queries // 2) for size in side)
                    for side in zip(*kind, strict=True)
                )
                if kind
                else (0, 0)
            )
            q, k = round(self.q * most_q / queries), round(self.k * most_k / keys)
            lse = round(self.own.lse * most_q / queries)
            copied = 1.0 if self.rows > 1 else 0.5 if causal else float(len(kind) > 1)
            forward = max(forward, round(copied * (q + k)) + q + lse)
            backward = max(backward, round(copied * (3 * q + k)) + lse + q + k)
        if found:
            heads = self.own.heads // self.own.split.ulysses
            together = min(most_together(queries, self.rows), queries * self.rows)
            backward += PADDING * together * heads * self.own.head_dim * self.own.main
        return forward, backward

    def written_out(self, entry: Entry) -> Explicit:
        """Memory of the kernel of an entry, where none of torch's computes such scores."""
        if self.scores.plain:
            return Explicit()
        return Explicit.of(
            self.scores,
            rows=self.rows,
            queries=entry.queries.stop - entry.queries.start,
            keys=entry.keys.stop - entry.keys.start,
            per_group=self.own.heads // self.own.groups,
            head_dim=self.own.head_dim,
            size=self.own.size,
            masked=entry.causal,
        )


class _Memory:
    """A tensor, or several together, that is let go of when nobody refers to it."""

    def __init__(self, tape: Tape, size: int) -> None:
        self._tape, self._size, self._references = tape, size, 1
        tape.take(size)

    def refer(self) -> _Memory:
        self._references += 1
        return self

    def let_go(self) -> None:
        self._references -= 1
        if not self._references:
            self._tape.drop(self._size)


class _Replay:
    """One member's forward or backward."""

    def __init__(self, whole: _Whole, what: Pass, member: int) -> None:
        self.whole, self.what, self.me = whole, what, member
        part = whole.own.plans.part(what, member)
        self.gathers = whole.own.plans.gathers
        self.pairs, self.messages = part.pairs, () if self.gathers else part.messages
        self._needed = part.needed
        self.tape = Tape()
        self._bundles: dict[tuple[Kind, int], _Memory] = {}
        self._coming: dict[Message, _Memory] = {}
        self._sums: dict[tuple[Kind, int], _Memory] = {}
        self._sent: list[list[_Memory]] = []

    def peak(self) -> int:
        """The most bytes, besides what :func:`attention_workspace` leaves out."""
        w = self.whole
        n = w.own.split.ring
        if self.gathers:
            self.tape.take(n * w.wide_k if self.what == "I" else 0, n * w.k, w.k)
            self.tape.drop(w.k)
        for number in range(max(len(self.pairs), len(self.messages))):
            if not self.gathers:
                self._exchange(number)
            pair = self.pairs[number] if number < len(self.pairs) else None
            if pair is not None:
                self._compute(*pair)
            for bundle in [b for b in self._bundles if self._needed[b] <= number]:
                self._bundles.pop(bundle).let_go()
        if self.what == "F":
            if w.own.main > w.own.size:
                self.tape.pass_by(w.q)
            return max(0, self.tape.peak - w.q - w.own.lse)
        if self.gathers:
            self.tape.drop(n * w.k)
            self.tape.pass_by((n - 1) * w.wide_k)  # what others have found of these keys
        if w.own.main > w.own.size:
            self.tape.pass_by(w.q + w.k)
        return max(0, self.tape.peak - w.q - w.k)

    def _exchange(self, number: int) -> None:
        messages = self.messages[number] if number < len(self.messages) else ()
        letters = [
            letter
            for message in messages
            if message.source == self.me
            for letter in self._content(message)
        ]
        while len(self._sent) >= UNDER_WAY:
            for letter in self._sent.pop(0):
                letter.let_go()
        for message in messages:
            if message.target == self.me:
                size = self._size(message)
                self._coming[message] = _Memory(self.tape, size)
                letters.append(self._coming[message].refer())
        self._sent.append(letters)

    def _size(self, message: Message) -> int:
        size = self.whole.own.bytes_of(message, backward=self.what == "I")
        return round(size * self.whole.attended) if message.kind == "keys" else size

    def _content(self, message: Message) -> list[_Memory]:
        bundle = message.kind, message.home
        if message.what != "bundle":
            self._arrive(message.what, bundle)
            self._sum(bundle)
            return [self._sums.pop(bundle)]
        if message.home != self.me:
            return [self._bundle(bundle).refer()]
        w = self.whole
        size = (w.q if message.kind == "queries" else w.k) if w.viewed else 0
        if message.kind == "queries" and self.what == "I":
            self.tape.pass_by(w.wide_q, *w.widened)  # dot products of gradient and output
            size += 2 * w.own.lse  # LSE, which is a view, and these
        return [_Memory(self.tape, size)] if size else []

    def _bundle(self, bundle: tuple[Kind, int]) -> _Memory:
        if bundle not in self._bundles:
            (message,) = [
                m for m in self._coming if (m.kind, m.home) == bundle and m.what == "bundle"
            ]
            self._bundles[bundle] = self._coming.pop(message)
        return self._bundles[bundle]

    def _arrive(self, what: str, bundle: tuple[Kind, int]) -> None:
        """Take in what has come of a bundle; it is let go of."""
        for message in [m for m in self._coming if (m.what, m.kind, m.home) == (what, *bundle)]:
            self._coming.pop(message).let_go()

    def _sum(self, bundle: tuple[Kind, int]) -> None:
        """Memory for a result or a gradient, if there is none yet."""
        w = self.whole
        size = w.wide_q + (w.own.lse if self.what == "F" else 0)
        if bundle not in self._sums:
            self._sums[bundle] = _Memory(self.tape, size if bundle[0] == "queries" else w.wide_k)

    def _compute(self, i: int, j: int) -> None:
        w = self.whole
        for kind, home in zip(KINDS, (i, j), strict=True):
            if home != self.me and not self.gathers:
                self._bundle((kind, home))
        output = None
        if self.what == "I":
            if i != self.me:
                last = w.own.lse if w.own.main == w.own.size else w.q  # a factor, or the result
                self.tape.pass_by(w.wide_q, *w.widened[:1], 3 * w.own.lse, last)
                output = _Memory(self.tape, w.q)
            self._sum(("queries", i))
            if not self.gathers:
                self._sum(("keys", j))
        self.tape.pass_by(w.packed(i, j)[self.what == "I"])
        for entry in w.entries(i, j):
            q, k = w.share(entry)
            if self.what == "I":
                self.tape.pass_by(round(w.q * q), round(w.k * k), w.written_out(entry).backward)
                continue
            block, lse = round(w.q * q), round(w.own.lse * q)
            self.tape.pass_by(block, lse, w.written_out(entry).forward)
            if ("queries", i) not in self._sums and q == 1:
                if w.own.main > w.own.size:
                    self.tape.pass_by(block, w.wide_q, lse)
                self._sum(("queries", i))
                continue
            self._sum(("queries", i))
            wide = round(w.wide_q * q) if w.own.main > w.own.size else 0
            self.tape.pass_by(block, lse, 3 * lse, wide)
        if output is not None:
            output.let_go()
