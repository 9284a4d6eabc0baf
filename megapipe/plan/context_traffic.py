"""Bytes that a context-parallel rank sends while it attends, counted in its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megapipe.context.plan import Message
from megapipe.dtypes import DTYPE_BYTES, main_bytes
from megapipe.layers.policy import Span
from megapipe.layout.layout import Layout
from megapipe.model.interface import Collective


class Sent(NamedTuple):
    """Collectives or messages of one kind in one attention of a layer."""

    axis: str
    """cp, or ulysses within it."""
    collective: Collective
    calls: int
    bytes: int
    """Of the whole tensor, or of all messages."""
    members: int


class _Attention(NamedTuple):
    """Sizes of what one rank attends with, within its ring."""

    rows: int
    """Of queries, and of its own keys, of all samples of a piece."""
    heads: int
    groups: int
    head_dim: int
    size: int
    """Bytes of a value."""
    main: int
    """Bytes of a value in the type of accumulation."""

    @property
    def queries(self) -> int:
        return self.rows * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return 2 * self.rows * self.groups * self.head_dim

    @property
    def lse(self) -> int:
        return self.rows * self.heads * self.main

    def bytes_of(self, message: Message, *, backward: bool) -> int:
        """Of a message of the forward, or of the backward."""
        of_queries = message.kind == "queries"
        if message.what == "gradient":
            return (self.queries if of_queries else self.keys) * self.main
        if message.what == "partial":
            return self.queries * self.main + self.lse
        if not of_queries:
            return self.keys * self.size
        return (3 * self.queries * self.size + self.lse) if backward else self.queries * self.size


def attention_traffic(layout: Layout, tokens: int, index: int) -> dict[str, list[Sent]]:
    """All that the context-parallel rank of `index` sends in one layer's attention, forward (F) and
    backward (I), of a piece of which it holds `tokens` tokens."""
    needs, split = layout.model.kernels.attention, layout.split
    if split.cp == 1 or needs is None:
        return {"F": [], "I": []}
    groups, ring = max(needs.groups, split.ulysses), split.place(index)[0]
    size, main = DTYPE_BYTES[layout.model.dtype], main_bytes(layout.model.dtype)
    here = _Attention(
        rows=tokens * split.ulysses,
        heads=needs.heads // split.ulysses,
        groups=groups // split.ulysses,
        head_dim=needs.head_dim,
        size=size,
        main=main,
    )
    heads = [needs.heads, groups, groups, needs.heads]
    resharded = Sent(
        "ulysses",
        "all_to_all",
        len(heads),
        tokens * sum(heads) * needs.head_dim * size,
        split.ulysses,
    )
    found: dict[str, list[Sent]] = {"F": [resharded], "I": [resharded]}
    if layout.context.gathers:
        gathered = Sent("cp", "all_gather", 1, split.ring * here.keys * size, split.ring)
        grads = Sent("cp", "reduce_scatter", 1, split.ring * here.keys * main, split.ring)
        found["F"].append(gathered)
        found["I"] += [gathered, grads]
    else:
        for what, messages in (
            ("F", layout.context.forward.forward),
            ("I", layout.context.backward.backward),
        ):
            own = [m for exchange in messages for m in exchange if m.source == ring]
            total = sum(here.bytes_of(m, backward=what == "I") for m in own)
            found[what].append(Sent("cp", "send", len(own), total, split.ring))
    return {what: [s for s in sent if s.members > 1 and s.calls] for what, sent in found.items()}


def attentions(layout: Layout, stage: int) -> Iterator[tuple[str, int]]:
    """How often the layers of a stage attend in the F of a piece and in its I: ("F", forwards) and
    ("I", backwards); forwards that are run again count with the F."""
    spans: Sequence[Span] = layout.spans[stage]
    blocks = sum(span.blocks for span in spans)
    again = stage in layout.schedule.recompute
    rerun = sum(
        span.blocks
        for span in spans
        if again or {"block", "attention"} & set(span.policy.recompute)
    )
    yield "F", blocks + rerun
    yield "I", blocks
