"""Bytes of messages between context-parallel ranks, by which ways to attend are compared."""

from __future__ import annotations

from typing import NamedTuple

from megapipe.context.plan import Message
from megapipe.context.split import Split
from megapipe.dtypes import DTYPE_BYTES, Dtype, main_bytes
from megapipe.layout.context_plan import ContextPlans
from megapipe.model.kernel_needs import AttentionNeeds


class Attention(NamedTuple):
    """The attention of a layer and micro-batch on one rank, which holds so many tokens of it."""

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

    @classmethod
    def of(
        cls,
        split: Split,
        plans: ContextPlans,
        needs: AttentionNeeds,
        dtype: Dtype,
        tokens: int,
    ) -> Attention:
        """Of a model that `needs` such attention."""
        groups, sizes = max(needs.groups, split.ulysses), (DTYPE_BYTES[dtype], main_bytes(dtype))
        return cls(split, plans, tokens, needs.heads, groups, needs.head_dim, *sizes)

    @property
    def queries(self) -> int:
        """Values of the queries of a member of the ring: more positions, fewer heads."""
        return self.tokens * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Values of its keys and values."""
        return 2 * self.tokens * self.groups * self.head_dim

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

    @property
    def resharded(self) -> int:
        """Bytes of queries, keys, values and output, whose heads and positions change places in the
        forward or the backward."""
        heads = 2 * self.heads + 2 * self.groups
        return self.tokens * heads * self.head_dim * self.size
