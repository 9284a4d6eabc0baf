"""Makes the ring plans of context-parallel attention, and checks that each computes every pair of
query and key blocks once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megapipe.config.config import Config
from megapipe.config.context import TURNED
from megapipe.context import plans
from megapipe.context.plan import Kind, Message, Plan, PlanError, RankPlan
from megapipe.context.split import PositionSplit
from megapipe.context.tensors import RingTensors, size_of, split_groups
from megapipe.errors import ConfigError
from megapipe.model.kernel_needs import AttentionNeeds
from megapipe.util.user_code import UserCode, is_user_code

Pass = Literal["F", "I"]
"""Pass of attention: F is the forward; I is the backward, which is part of the operation I."""
PASSES: tuple[Pass, ...] = ("F", "I")


class ContextPlans(NamedTuple):
    """The forward and the backward plan of a ring."""

    forward: Plan
    backward: Plan
    gathers: bool = False
    """Whether one all-gather of keys is used instead of the plans' messages."""

    @property
    def turned(self) -> bool:
        """Whether queries circulate in the backward; keys circulate in the forward."""
        return self.backward is not self.forward

    def of(self, what: Pass) -> tuple[Plan, Sequence[Sequence[Message]]]:
        """Return the plan of a pass, and for each exchange of the pass its messages."""
        if what == "F":
            return self.forward, self.forward.forward
        return self.backward, self.backward.backward

    def part(self, what: Pass, rank: int) -> RankPlan:
        """Return the part of a pass's plan that one ring rank executes."""
        return (
            self.forward.forward_parts[rank] if what == "F" else self.backward.backward_parts[rank]
        )


def context_plans(
    config: Config, split: PositionSplit, attention: AttentionNeeds | None
) -> ContextPlans:
    """Make the ring plans of a model's `attention`. Raises :class:`ConfigError` unless they compute
    each visible pair of query and key blocks once."""
    forward = _plan(config, split.ring)
    if split.ring == 1:
        return ContextPlans(forward, forward)
    backward = forward
    may_turn = config.context.algorithm in TURNED
    if may_turn and attention is not None and queries_travel(config, split, attention):
        backward = plans.travelling_queries(forward)
    blocks = split.local([config.train.sequence_length], 0).blocks
    first = [min(run.first for run in block.runs) for block in blocks]
    last = [max(run.last for run in block.runs) for block in blocks]
    try:
        for plan in (forward, backward):
            plan.prove(lambda queries, keys: first[keys] <= last[queries])
    except PlanError as error:
        raise ConfigError(f"context.algorithm={config.context.algorithm}: {error}") from None
    return ContextPlans(forward, backward, config.context.algorithm == "all_gather")


def _plan(config: Config, n: int) -> Plan:
    context = config.context
    if context.algorithm == "double_ring":
        assert context.inner_ring_size is not None
        return plans.double_ring(n, context.inner_ring_size)
    if context.algorithm == "teams":
        assert context.team_size is not None
        return plans.teams(n, context.team_size)
    if is_user_code(context.algorithm):
        return _own_plan(context.algorithm, n)
    return plans.helpers(n) if context.algorithm == "helpers" else plans.ring(n)


def _own_plan(spec: str, n: int) -> Plan:
    """Make the ring plan of a user-defined function. For each round and rank the function returns a
    pair (rank of the queries, rank of the keys), or None if the rank idles."""
    code = UserCode(spec, what="context.algorithm=", error=ConfigError)
    returned = code.call({"ranks": n}, ("ranks",))
    try:
        rounds = tuple(
            tuple(None if pair is None else (int(pair[0]), int(pair[1])) for pair in pairs)
            for pairs in returned
        )
    except (TypeError, ValueError, IndexError):
        raise code.problem(
            "it does not return a list of rounds: expected per round a list with a pair "
            "(queries of, keys of) or None for each rank"
        ) from None
    if not rounds or any(len(pairs) != n for pairs in rounds):
        raise code.problem(f"expected rounds of {n} pairs, one for each rank")
    return Plan(spec, rounds)


def queries_travel(config: Config, split: PositionSplit, attention: AttentionNeeds) -> bool:
    """Whether queries circulate in the backward, instead of keys and values; gradients circulate
    too. By default the tensors with fewer bytes circulate (BurstAttention, 2403.09347)."""
    if config.context.backward_circulates != "auto":
        return config.context.backward_circulates == "queries"
    tensors = ring_tensors(config, split, attention)

    def size(kind: Kind) -> int:
        bundle = tensors.carried("bundle", kind, backward=True)
        gradient = tensors.carried("gradient", kind, backward=True)
        return size_of(bundle + gradient, config.model.dtype)

    return size("queries") < size("keys")


def ring_tensors(config: Config, split: PositionSplit, attention: AttentionNeeds) -> RingTensors:
    """Return the shapes of a micro-batch's tensors on a ring's ranks, for uncut sequences."""
    n, head_dim = split.ulysses, attention.head_dim
    rows = config.train.sequence_length // split.ring, config.train.microbatch
    heads, groups = attention.heads // n, split_groups(attention.groups, n) // n
    return RingTensors((*rows, heads, head_dim), (*rows, groups, head_dim))
