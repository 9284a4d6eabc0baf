"""Loading of no-flush schedules by name: an order, and a registered or user-defined policy."""

from collections.abc import Sequence
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, stream
from megapipe.schedule.async_schedules.orders import build
from megapipe.schedule.async_schedules.policies import Lists, VersionPolicy, policy
from megapipe.schedule.ir import Op, Read
from megapipe.util.user_code import UserCode, is_user_code


def load_async_schedule(
    order: str,
    weights: str,
    *,
    ranks: int,
    microbatches: int,
    extra_warmup: int = 0,
    prediction_horizon: str = "update",
    ranks_per_stage: Sequence[int] | None = None,
) -> AsyncSchedule:
    """Return a no-flush schedule by name.

    Args:
        order: one of :data:`~megapipe.schedule.async_schedules.orders.NAMES`.
        weights: one of :data:`~megapipe.schedule.async_schedules.policies.POLICIES`, or
            ``module:function``. Such a function has two arguments: `lists`, the lists of all ranks
            (:class:`~megapipe.schedule.async_schedules.policies.Lists`), and an operation `op`. It
            returns the :class:`~megapipe.schedule.ir.Read` of `op`.
        ranks: number of pipeline ranks.
        microbatches: number of micro-batches per update window.
        extra_warmup: number of additional warm-up forwards of each rank.
        prediction_horizon: for the policy "predict", what weights are predicted for: "update", the
            version that the update of the micro-batch's window changes, or "round_trip", the time
            when the micro-batch ends at the first stage.
        ranks_per_stage: number of ranks of each stage, for the order 1f1b_rr.

    Raises:
        ScheduleError: an unknown name, sizes that do not fit each other, or an exception in user
            code.
    """
    found = _load(weights) if is_user_code(weights) else policy(weights, horizon=prediction_horizon)
    return stream(
        build(
            order, ranks, microbatches, extra_warmup=extra_warmup, ranks_per_stage=ranks_per_stage
        ),
        found,
    )


def _load(spec: str) -> VersionPolicy:
    """Load a user-defined policy."""
    code = UserCode(spec, what="weights", error=ScheduleError)
    code.check(("lists", "op"))

    def reads(lists: Lists, op: Op) -> Read:
        result: Any = code.call({"lists": lists, "op": op}, ("lists", "op"))
        if not isinstance(result, Read):
            raise code.problem(f"it returned {result!r} for {op}; it must return a Read")
        return result

    return VersionPolicy(spec, reads, orders=("1f1b", "eager_1f1b", "two_group"), follows=False)
