"""The stream that a user names: an order, and a policy of this package or of the user's own."""

from collections.abc import Sequence
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Op, Read
from megapipe.schedule.streams.orders import build
from megapipe.schedule.streams.policies import Lists, VersionPolicy, policy
from megapipe.schedule.streams.stream import AsyncSchedule, stream
from megapipe.util.user_code import UserCode, is_user_code


def load_stream(
    order: str,
    weights: str,
    *,
    ranks: int,
    microbatches: int,
    advance: int = 0,
    horizon: str = "update",
    replicas: Sequence[int] | None = None,
) -> AsyncSchedule:
    """A stream by name.

    Args:
        order: one of :data:`~megapipe.schedule.streams.orders.NAMES`.
        weights: one of :data:`~megapipe.schedule.streams.policies.POLICIES`, or
            ``module:function``: a function of `lists`
            (:class:`~megapipe.schedule.streams.policies.Lists`) and an operation `op` of them,
            which returns what this reads.
        ranks: pipeline ranks.
        microbatches: micro-batches per window.
        advance: forwards that each rank is ahead beyond what the order has.
        horizon: of predict, up to when weights are predicted.
        replicas: of 1f1b_rr, the ranks of each stage.

    Raises:
        ScheduleError: a name that is unknown, sizes that do not go together, or an exception in the
            user's code.
    """
    found = _own(weights) if is_user_code(weights) else policy(weights, horizon=horizon)
    return stream(build(order, ranks, microbatches, advance=advance, replicas=replicas), found)


def _own(spec: str) -> VersionPolicy:
    """A policy of the user's."""
    code = UserCode(spec, what="weights", error=ScheduleError)
    code.check(("lists", "op"))

    def reads(lists: Lists, op: Op) -> Read:
        result: Any = code.call({"lists": lists, "op": op}, ("lists", "op"))
        if not isinstance(result, Read):
            raise code.problem(f"it returned {result!r} for {op}; return a Read")
        return result

    return VersionPolicy(spec, reads, orders=("1f1b", "eager_1f1b", "two_group"), follows=False)
