"""When data-parallel replicas communicate: actions for gradients and weights in a rank's program.

The gradients of a stage are reduced once per step, after the stage's last weight gradient; buckets
of them leave within that operation (:func:`last_gradients`). Under ZeRO-2 and 3 their memory is
released in between, so they are reduced after each *run* of weight gradients of one stage; a
breadth-first order (Lamy-Poirier, 2211.05953) has one run per stage. A reduction begins after the
operation's message is sent: the rank may have to wait for an earlier reduction, and its neighbour
should not wait too. A stage of several holders is reduced once, when the last of them is
through with it (:mod:`megapipe.schedule.holders`). Updated weights are awaited before the first
operation that needs them. ZeRO-3 gathers the weights of the next stages while one computes.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.holders import SharedReduction, shared_reductions
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.program import Action, ActionKind, Program

_USES_WEIGHTS = frozenset((Kind.F, Kind.B, Kind.I, Kind.R))
_ADDS_GRADIENTS = frozenset((Kind.B, Kind.W))


class ReplicaPolicy(NamedTuple):
    """How often replicas reduce gradients and gather weights, and when."""

    zero: int = 1
    """The ZeRO stage (Rajbhandari et al., 1910.02054): 2 shards gradients, 3 weights too."""
    prefetch: int = 1
    """How many stages ahead of their use ZeRO-3 gathers weights."""
    chunked_loss: bool = False
    """The last stage computes its head's weight gradient within ``I``, not ``W``, as a loss that
    takes a few tokens at a time does. It matters to ZeRO-2 and 3."""

    def check(self) -> None:
        """Raise :class:`ScheduleError` for a ZeRO stage that there is not, or a negative number."""
        if self.zero not in (0, 1, 2, 3):
            raise ScheduleError(f"replicas: zero {self.zero} is not 0, 1, 2 or 3")
        if self.prefetch < 0:
            raise ScheduleError(f"replicas: prefetch {self.prefetch} is negative")


REPLICAS = ReplicaPolicy()
"""The policy of a timing that is given none."""


def add_data_parallel_actions(
    program: Program,
    *,
    shared: Sequence[SharedReduction] = (),
    in_runs: bool,
    prefetch: int | None,
    unsplit: Collection[int] = (),
) -> Program:
    """`program` with the replicas' actions: REDUCE, ALLOC_GRADS, WAIT_WEIGHTS, UNSHARD and RESHARD.

    Args:
        shared: where the stages of several holders are reduced, once each.
        in_runs: reduce other stages after each run of weight gradients, and ALLOC_GRADS them before
        it. prefetch: how many stages ahead weights are gathered; None: weights are never released.
        unsplit: stages that compute weight gradients within ``I`` too.
    """
    actions: Sequence[Action] = program.actions
    actions = list(_with_reductions(actions, shared, unsplit, in_runs=in_runs))
    if prefetch is None:
        actions = list(_with_awaits(actions))
    else:
        actions = list(_with_gathers(actions, prefetch))
    return Program(program.rank, tuple(actions))


def with_zero_actions(
    programs: Iterable[Program],
    schedule: Schedule,
    policy: ReplicaPolicy,
) -> Iterator[Program]:
    """The programs of a schedule's ranks with the actions that `policy` asks of replicas."""
    shared = shared_reductions(schedule)
    for program in programs:
        yield add_data_parallel_actions(
            program,
            shared=shared[program.rank],
            in_runs=policy.zero >= 2,
            prefetch=policy.prefetch if policy.zero == 3 else None,
            unsplit=[schedule.placement.stages - 1] if policy.chunked_loss else (),
        )


def operations(schedule: Schedule, rank: int) -> Program:
    """A rank's operations as a program without messages, which do not change where
    :func:`add_data_parallel_actions` puts its actions."""
    return Program(
        rank,
        tuple(Action(ActionKind.COMPUTE, *op[:4]) for op in schedule.rank_ops(rank)),
    )


def last_gradients(actions: Sequence[Action]) -> dict[int, int]:
    """The place of each REDUCE that follows a W or B of its own stage -> the place of that W or B.

    The operation adds the last gradients before the reduction, which can begin within it. A REDUCE
    may follow another operation where an I computes a head's weight gradient, or where the stage
    has several holders; such a REDUCE is left out.
    """
    found, last = {}, -1
    for place, action in enumerate(actions):
        if action.do == ActionKind.COMPUTE:
            last = place
        elif action.do == ActionKind.REDUCE and last >= 0:
            before = actions[last]
            if before.stage == action.stage and before.kind in _ADDS_GRADIENTS:
                found[place] = last
    return found


def _on(do: ActionKind, stage: int) -> Action:
    return Action(do, Kind.W, stage, -1)


def _with_reductions(
    actions: Sequence[Action],
    shared: Sequence[SharedReduction],
    unsplit: Collection[int],
    *,
    in_runs: bool,
) -> Iterator[Action]:
    due: dict[int, list[int]] = defaultdict(list)
    for done, stage in shared:
        due[done].append(stage)
    others = {stage for _, stage in shared}
    adding = [
        (i, action.stage)
        for i, action in enumerate(actions)
        if action.do == ActionKind.COMPUTE
        and (action.kind in _ADDS_GRADIENTS or (action.kind == Kind.I and action.stage in unsplit))
    ]
    runs = [list(run) for _, run in itertools.groupby(adding, key=lambda use: use[1])]
    first = {run[0][0] for run in runs} if in_runs else set()
    last = {run[-1][0] for run in runs}
    if not in_runs:
        last = set({stage: i for i, stage in adding}.values())
    complete, done = due[0], 0
    for i, action in enumerate(actions):
        if action.do != ActionKind.SEND:
            yield from (_on(ActionKind.REDUCE, stage) for stage in complete)
            complete = []
        own = action.stage not in others
        if own and i in first:
            yield _on(ActionKind.ALLOC_GRADS, action.stage)
        yield action
        if own and i in last:
            complete.append(action.stage)
        if action.do == ActionKind.COMPUTE:
            done += 1
            complete += due[done]
    yield from (_on(ActionKind.REDUCE, stage) for stage in complete)


def _with_awaits(actions: Sequence[Action]) -> Iterator[Action]:
    seen = set()
    for action in actions:
        if _needs_weights(action) and action.stage not in seen:
            seen.add(action.stage)
            yield _on(ActionKind.WAIT_WEIGHTS, action.stage)
        yield action


def _needs_weights(action: Action) -> bool:
    return action.do == ActionKind.COMPUTE and action.kind in _USES_WEIGHTS


def _with_gathers(actions: Sequence[Action], prefetch: int) -> Iterator[Action]:
    """The weights there at any time are those of the next 1 + `prefetch` different stages."""
    uses: dict[int, list[int]] = defaultdict(list)
    for i in range(len(actions) - 1, -1, -1):
        if _needs_weights(actions[i]):
            uses[actions[i].stage].append(i)
    gathered: list[int] = []
    awaited: set[int] = set()
    held: list[Action] = []  # what waits, or takes memory, until gathers have begun
    for action in actions:
        if action.do in (ActionKind.RECV, ActionKind.ALLOC_GRADS):
            held.append(action)
            continue
        if _needs_weights(action):
            following = sorted((later[-1], stage) for stage, later in uses.items() if later)
            wanted = [stage for _, stage in following[: 1 + prefetch]]
            for stage in [stage for stage in gathered if stage not in wanted]:
                gathered.remove(stage)
                awaited.discard(stage)
                yield _on(ActionKind.RESHARD, stage)
            for stage in wanted:
                if stage not in gathered:
                    gathered.append(stage)
                    yield _on(ActionKind.UNSHARD, stage)
            uses[action.stage].pop()
        yield from held
        held.clear()
        if _needs_weights(action) and action.stage not in awaited:
            awaited.add(action.stage)
            yield _on(ActionKind.WAIT_WEIGHTS, action.stage)
        yield action
    for stage in gathered:
        yield _on(ActionKind.RESHARD, stage)
