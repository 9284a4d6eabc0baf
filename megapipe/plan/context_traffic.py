"""Bytes that a context-parallel rank sends while it attends, counted in its plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from megapipe.context.plan import Message
from megapipe.context.split import Split
from megapipe.dtypes import DTYPE_BYTES, Dtype, main_bytes
from megapipe.layers.policy import Span
from megapipe.layout.context_plan import PASSES, ContextPlans, Pass
from megapipe.layout.layout import Layout
from megapipe.model.interface import Collective
from megapipe.model.kernel_needs import AttentionNeeds


class Sent(NamedTuple):
    """Collectives or messages of one kind in one attention of a layer."""

    axis: str
    """cp, or ulysses within it."""
    collective: Collective
    calls: int
    bytes: int
    """Of the whole tensor, or of all messages."""
    members: int


class Attention(NamedTuple):
    """The attention of a layer on one rank: a piece of which it holds so many tokens."""

    split: Split
    plans: ContextPlans
    tokens: int
    heads: int
    """Of queries, on one tensor-parallel rank."""
    groups: int
    """Key/value heads, copies for ranks that split them included."""
    head_dim: int
    size: int
    """Bytes of a value."""
    main: int
    """Bytes of a value in the type of accumulation."""
    earlier: int = 0
    """Tokens of earlier slices that the rank holds, whose keys are attended to."""

    @classmethod
    def of(
        cls,
        split: Split,
        plans: ContextPlans,
        needs: AttentionNeeds,
        dtype: Dtype,
        tokens: int,
        earlier: int = 0,
    ) -> Attention:
        """Of a model that `needs` such attention."""
        groups, sizes = max(needs.groups, split.ulysses), (DTYPE_BYTES[dtype], main_bytes(dtype))
        return cls(split, plans, tokens, needs.heads, groups, needs.head_dim, *sizes, earlier)

    @property
    def queries(self) -> int:
        """Values of the queries of a member of the ring: more positions, fewer heads."""
        return self.tokens * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Values of its keys and values."""
        return 2 * (self.tokens + self.earlier) * self.groups * self.head_dim

    @property
    def lse(self) -> int:
        """Bytes of a value for each query and head."""
        return self.tokens * self.heads * self.main

    def bytes_of(self, message: Message, *, backward: bool) -> int:
        """Of a message of the forward, or of the backward."""
        of_queries = message.kind == "queries"
        if message.what == "gradient":
            return (self.queries if of_queries else self.keys) * self.main
        if message.what == "partial":
            return self.queries * self.main + self.lse
        if not of_queries:
            return self.keys * self.size
        if not backward:
            return self.queries * self.size
        return 2 * self.queries * self.size + 2 * self.lse

    @staticmethod
    def letters(message: Message, *, backward: bool) -> int:
        """How many tensors a message is."""
        if message.kind == "keys":
            return 2
        if message.what == "bundle":
            return 4 if backward else 1
        return 2 if message.what == "partial" else 1

    @property
    def resharded(self) -> Sent:
        """The all-to-alls of queries, keys, values and output, in the forward or the backward."""
        heads = 2 * self.heads + 2 * self.groups
        size = self.tokens * heads * self.head_dim * self.size
        return Sent("ulysses", "all_to_all", 4, size, self.split.ulysses)

    def sent(self, what: Pass, index: int) -> list[Sent]:
        """All that the rank of a context-parallel index sends."""
        ring, n = self.split.place(index)[0], self.split.ring
        found = [self.resharded]
        if self.plans.gathers:
            found.append(Sent("cp", "all_gather", 1, n * self.keys * self.size, n))
            if what == "I":
                found.append(Sent("cp", "reduce_scatter", 1, n * self.keys * self.main, n))
        else:
            backward = what == "I"
            messages = chain(*self.plans.part(what, ring).messages)
            own = [message for message in messages if message.source == ring]
            total = sum(self.bytes_of(message, backward=backward) for message in own)
            letters = sum(self.letters(message, backward=backward) for message in own)
            found.append(Sent("cp", "send", letters, total, n))
        return [each for each in found if each.members > 1 and each.calls]


def attention_traffic(
    layout: Layout, tokens: int, index: int, earlier: int = 0
) -> dict[Pass, list[Sent]]:
    """All that the context-parallel rank of `index` sends in one layer's attention, forward (F) and
    backward (I), of a piece of which it holds `tokens` tokens, and `earlier` ones of the slices
    before it."""
    needs = layout.model.kernels.attention
    if layout.split.cp == 1 or needs is None:
        return {"F": [], "I": []}
    own = Attention.of(layout.split, layout.context, needs, layout.model.dtype, tokens, earlier)
    return {what: own.sent(what, index) for what in PASSES}


def attentions(layout: Layout, stage: int, what: Pass, axis: str) -> int:
    """How often the layers of a stage exchange over cp, or ulysses, in the F of a piece (with
    forwards that are run again) or in its I. A second run that finds the results of attention moves
    heads and positions again, but does not attend."""
    spans: Sequence[Span] = layout.spans[stage]
    blocks = sum(span.blocks for span in spans)
    if what == "I" or (axis == "cp" and any(span.policy.keeps_attention for span in spans)):
        return blocks
    again, modules = stage in layout.schedule.recompute, {"block", "attention"}
    rerun = sum(span.blocks for span in spans if again or modules & set(span.policy.recompute))
    return blocks + rerun
