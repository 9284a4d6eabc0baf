"""The plans by which a run attends over split positions, proved."""

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
from megapipe.util.user_code import UserCode, is_user_code

Pass = Literal["F", "I"]
"""Forward and backward of attention, by the operation that they are part of."""
PASSES: tuple[Pass, ...] = ("F", "I")


class ContextPlans(NamedTuple):
    """Of a ring."""

    forward: Plan
    backward: Plan
    gathers: bool = False
    """Keys are gathered at once, in the place of what the plans would send."""

    @property
    def turned(self) -> bool:
        """Whether queries travel in the backward, and keys in the forward."""
        return self.backward is not self.forward

    def of(self, what: Pass) -> tuple[Plan, Sequence[Sequence[Message]]]:
        """The plan of the forward or the backward, and its messages by exchange."""
        if what == "F":
            return self.forward, self.forward.forward
        return self.backward, self.backward.backward

    def part(self, what: Pass, rank: int) -> RankPlan:
        """The share of a member of the ring in the forward or the backward."""
        return (
            self.forward.forward_parts[rank] if what == "F" else self.backward.backward_parts[rank]
        )


def context_plans(config: Config, split: PositionSplit) -> ContextPlans:
    """Raises :class:`ConfigError` for a plan that does not compute each block once."""
    forward = _plan(config, split.ring)
    if split.ring == 1:
        return ContextPlans(forward, forward)
    backward = forward
    if config.context.plan in TURNED and queries_travel(config, split):
        backward = plans.travelling_queries(forward)
    blocks = split.local([config.train.sequence_length], 0).blocks
    first = [min(run.first for run in block.runs) for block in blocks]
    last = [max(run.last for run in block.runs) for block in blocks]
    try:
        for plan in (forward, backward):
            plan.prove(lambda queries, keys: first[keys] <= last[queries])
    except PlanError as error:
        raise ConfigError(f"context.plan={config.context.plan}: {error}") from None
    return ContextPlans(forward, backward, config.context.plan == "all_gather")


def _plan(config: Config, n: int) -> Plan:
    context = config.context
    if context.plan == "double_ring":
        assert context.inner is not None
        return plans.double_ring(n, context.inner)
    if context.plan == "teams":
        assert context.team is not None
        return plans.teams(n, context.team)
    if is_user_code(context.plan):
        return _own_plan(context.plan, n)
    return plans.helpers(n) if context.plan == "helpers" else plans.ring(n)


def _own_plan(spec: str, n: int) -> Plan:
    """A function of the user's gives for each round and rank (queries of, keys of), or None."""
    code = UserCode(spec, what="context.plan=", error=ConfigError)
    given = code.call({"ranks": n}, ("ranks",))
    try:
        rounds = tuple(
            tuple(None if pair is None else (int(pair[0]), int(pair[1])) for pair in pairs)
            for pairs in given
        )
    except (TypeError, ValueError, IndexError):
        raise code.problem(
            "it returns no list of rounds: expected for each round a list with a pair (queries of, "
            "keys of) or None for each rank"
        ) from None
    if not rounds or any(len(pairs) != n for pairs in rounds):
        raise code.problem(f"expected rounds of {n} pairs, one for each rank")
    return Plan(spec, rounds)


def queries_travel(config: Config, split: PositionSplit) -> bool:
    """Whether in the backward queries go around with their gradients, and not keys, by default
    since these are fewer bytes (BurstAttention, 2403.09347)."""
    if config.context.travels != "auto":
        return config.context.travels == "queries"
    tensors = ring_tensors(config, split)

    def size(kind: Kind) -> int:
        bundle = tensors.carried("bundle", kind, backward=True)
        gradient = tensors.carried("gradient", kind, backward=True)
        return size_of(bundle + gradient, config.model.dtype)

    return size("queries") < size("keys")


def ring_tensors(config: Config, split: PositionSplit) -> RingTensors:
    """Describe the tensors of a micro-batch whose sequences are not cut into slices."""
    model, tp, n = config.model, config.parallel.tp, split.ulysses
    assert model.kv_heads is not None
    assert model.head_dim is not None
    rows = config.train.sequence_length // split.ring, config.train.microbatch
    heads, groups = model.heads // tp // n, split_groups(model.kv_heads // tp, n) // n
    return RingTensors((*rows, heads, model.head_dim), (*rows, groups, model.head_dim))
