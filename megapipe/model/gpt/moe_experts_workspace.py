"""Memory that experts take within an operation, on a tape. No torch.

Each step is that of :mod:`megapipe.layers.experts`. Experts are chosen evenly, with a capacity as
often as they can be. What choosing takes by itself, which is over before there are rows, is left
out.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from megapipe.layers.expert_chunks import edges
from megapipe.model.gpt.moe import mixture_parameters, routing_of
from megapipe.model.gpt.moe_journeys import Chunk, Row, Ways
from megapipe.model.gpt.moe_memory import (
    PLACE,
    experts_queued,
    experts_saved,
    high_bytes,
    rows_of,
    tokens_of,
)
from megapipe.model.gpt.parameters import known
from megapipe.model.gpt.workspace_parts import Parts
from megapipe.model.tape import Tape


class ExpertsWorkspace:
    """Tensors that the experts of a layer make and free; others hold what they are given."""

    def __init__(self, parts: Parts, layer: int) -> None:
        self.parts = parts
        model, sizes = parts.model, parts.sizes
        size, high = parts.size, high_bytes(model)
        self.routing = routing_of(model.moe, layer)
        self.row, self.weight = model.hidden * size, high
        self.narrow = size < high
        """Whether logits, weights and sums over choices are in a wider type."""
        self.on_its_way = Row.of(sizes.dispatch.codec, model.hidden, size)
        self.weight_on_its_way = Row.of("none", 1, high)
        self.tokens = tokens = tokens_of(sizes)
        self.choices = tokens * model.moe.top_k
        self.wide_tokens = tokens * model.hidden * high
        """Hidden states of all tokens in that type."""
        self.logits = tokens * self.routing.experts * high
        self.inner = known(model.moe.ffn) // sizes.etp * size
        """Bytes of a row before the second product."""
        self.wide = self.inner * (2 if model.gated else 1)
        """After the first."""
        saved = dict(experts_saved(model, sizes, layer))
        self.saved, self.queued = sum(saved.values()), experts_queued(model, sizes, layer)
        early = "choice", "counts", "order", "rows of choices", "order of arrival"
        self.early = sum(saved.get(name, 0) for name in early)
        """Of what is saved, that which is there before the first rows are."""
        self.numel = {"up": 0, "down": 0}
        """Of all matrices, with biases."""
        for spec in mixture_parameters(model, layer):
            if spec.experts:
                self.numel[spec.name.split(".")[-2]] += prod(spec.shape)
        self.ways = self._ways(rows_of(self.routing, sizes))

    def _ways(self, rows: int) -> Ways:
        sizes = self.parts.sizes
        dispatch = sizes.dispatch
        fetched, parts = dispatch.fetched
        of_each = self.routing.experts // (sizes.ep * fetched)
        own = min(rows, self.choices * sizes.etp) if dispatch.padded is None else rows
        matrices = sum(self.numel.values()) * self.parts.size if fetched * parts > 1 else 0
        chunks = [
            Chunk(
                experts=(last - first) * fetched,
                own=own * last // of_each - own * first // of_each,
                here=rows * last // of_each - rows * first // of_each,
                matrices=matrices * (last - first) // of_each,
            )
            for first, last in pairwise(edges(of_each, dispatch.chunks))
        ]
        if slots := dispatch.slots:  # rows of copies would be others' here
            chunks.append(Chunk(experts=slots, own=0, here=0, matrices=0))
        return Ways(
            chunks,
            etp=sizes.etp,
            ranks=sizes.ep * sizes.etp,
            gathers=dispatch.form == "all_gather",
            two_hops=dispatch.form == "hierarchical",
            joins=parts > 1,
        )

    def forward(self, tape: Tape, *, keep: bool, has_value: bool) -> None:
        """Leaves the sums over choices on top, if they have a value."""
        start, row, local = tape.now, self.row, self.parts.local
        if self.narrow:
            tape.pass_by(self.wide_tokens, self.logits)
        tape.take(2 * self.logits)  # logits and scores
        tape.take(self.early, self.choices * self.weight)
        journey = self.ways.journey(tape)
        home = journey.home(self.on_its_way, self._summed(row))
        x = journey.rows(self.on_its_way, self.tokens)
        weights = journey.rows(self.weight_on_its_way, self.choices)
        for chunk in journey.in_turn(x, weights):
            tape.take(chunk.here * self.wide)
            if has_value:
                tape.take(chunk.here * self.inner)
                tape.take(chunk.here * row)
                if self.parts.model.bias:
                    tape.pass_by(chunk.here // chunk.experts * row)
                tape.drop(chunk.here * self.inner)
                home.give(chunk)
        if len(self.ways.chunks) > 1:  # they are joined
            tape.take(self.ways.here * self.wide)
            if self.ways.ranks > 1:
                tape.take(self.ways.here * (row + self.weight))
        if has_value:
            home.arrived()
            self._add_up(tape, lets_go=len(self.ways.chunks) > 1 or self.ways.etp > 1)
            tape.take(local * self.narrow)
        tape.drop(tape.now - start - keep * self.saved - has_value * local)

    def _summed(self, row: int) -> int:
        """Bytes of a row of results, which are added up over etp in the wider type."""
        return row * self.weight // self.parts.size if self.ways.etp > 1 else row

    def _add_up(self, tape: Tape, *, lets_go: bool = False) -> None:
        """Rows of each token's choices are added up in the wider type. If they are copied, it
        `lets_go` of them."""
        own = sum(chunk.own for chunk in self.ways.chunks) // self.ways.etp
        padded = self.parts.sizes.dispatch.padded is not None
        if padded or own < self.choices:  # a row of zeros comes after the others
            tape.take(own * self._summed(self.row))
            tape.drop(own * self._summed(self.row) * lets_go)
        one = self.wide_tokens if self.ways.etp > 1 else self.parts.local
        tape.pass_by(one, self.wide_tokens if one < self.wide_tokens else 0)
        tape.take(self.wide_tokens)
        if self.routing.top_k > 1:
            tape.pass_by(one)

    def backward(self, tape: Tape, at_once: bool) -> None:
        """Leaves the gradient of the input on top."""
        start, row, local = tape.now, self.row, self.parts.local
        tape.take(self.logits, self.choices * PLACE)  # scores and experts
        if self.ways.ranks == 1:
            tape.take(self.choices * self.weight)
        journey = self.ways.journey(tape)
        of_x = journey.home(self.on_its_way, self._summed(row))
        of_weights = journey.home(self.weight_on_its_way, self._summed(self.weight))
        for chunk in journey.in_turn(journey.rows(self.on_its_way, self.tokens)):
            inner = chunk.here * self.inner
            kept = inner * (self.parts.model.activation == "swiglu")
            tape.take(kept, inner)  # silu of the gate, and the activation
            tape.take(inner)  # its gradient
            tape.pass_by(inner)
            tape.take(chunk.here * self.weight)
            tape.take(chunk.here * self.wide)
            tape.drop(kept, inner)
            tape.take(chunk.here * row)
            of_x.give(chunk)
            of_weights.give(chunk)
        if len(self.ways.chunks) > 1:
            tape.take(self.ways.here * (row + self.inner + self.wide))
        if at_once:
            self._weight_grad(tape, "down")
        if self.ways.ranks == 1:
            tape.take(self.ways.here * row)
        if at_once:
            self._weight_grad(tape, "up")
        of_x.arrived()
        of_weights.arrived()
        tape.take(self.logits)
        if at_once and self.narrow:
            tape.pass_by(self.wide_tokens)  # for the router
        self._add_up(tape)
        tape.pass_by(self.wide_tokens)  # by way of the router
        tape.take(local * self.narrow)
        left = 0 if at_once else self.queued
        tape.drop(tape.now - start + self.saved - left - local)

    def weight_grads(self, tape: Tape) -> None:
        """In W: each frees what waited for it, but for the layer's input."""
        rows = self.ways.here
        self._weight_grad(tape, "down")
        tape.drop(rows * (self.inner + self.row + self.weight))
        self._weight_grad(tape, "up")
        tape.drop(rows * (self.row + self.wide))
        if self.narrow:
            tape.pass_by(self.wide_tokens)
        tape.drop(self.logits)

    def _weight_grad(self, tape: Tape, which: str) -> None:
        """Of one linear layer of all experts, one after the other. Those of fetched experts are
        made as a whole, brought into the order of the ranks, and summed over them."""
        sizes, high = self.parts.sizes, self.parts.high
        numel, experts = self.numel[which], self.routing.experts
        ep, etp = sizes.dispatch.fetched
        whole = numel * high if ep * etp > 1 else 0
        tape.take(whole)
        tape.pass_by(self.parts.added(numel // experts // sizes.etp))
        if self.narrow and self.parts.model.bias and which == "down":
            tape.pass_by(self.ways.here * sizes.ep // experts * self.parts.model.hidden * high)
        ordered = whole * (2 if etp > 1 else 1)
        tape.take(ordered)
        tape.pass_by(whole // (ep * etp) * (1 if sizes.cuda else ep * etp - 1))
        tape.drop(whole, ordered)
