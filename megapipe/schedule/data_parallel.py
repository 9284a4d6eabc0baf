"""Data-parallel actions of a rank's program: when gradients are reduced and weights gathered.

The gradients of a stage are reduced once per step, after the stage's last weight gradient; the
reduction of the first buckets can start within that operation (:func:`last_gradients`). ZeRO-2 and
3 free gradients, so they reduce after each *run* of consecutive weight gradients of one stage; a
breadth-first order (Lamy-Poirier, 2211.05953) has one run per stage. Before a reduction, the rank
sends the message of the operation that completes the gradients: the reduction may have to wait for
an earlier one, and should not delay the neighbour that needs the message. A stage of several
holders is reduced once, when all have finished it (:mod:`megapipe.schedule.shared_reductions`). A
rank waits for updated weights before the first operation that needs them. ZeRO-3 gathers the
weights of the next stages while one stage computes.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.shared_reductions import SharedReduction, shared_reductions

_USES_WEIGHTS = frozenset((Kind.F, Kind.B, Kind.I, Kind.R))
_ADDS_GRADIENTS = frozenset((Kind.B, Kind.W))


class ReplicaPolicy(NamedTuple):
    """Policy of data-parallel replicas: when they reduce gradients and gather weights."""

    zero: int = 1
    """The ZeRO stage (Rajbhandari et al., 1910.02054): 2 shards gradients, 3 weights too."""
    prefetch: int = 1
    """Number of stages by which ZeRO-3 gathers weights ahead of their use."""
    chunked_loss: bool = False
    """Whether the last stage computes its head's weight gradient within ``I``, not ``W``, as a
    chunked loss does. The difference matters to ZeRO-2 and 3."""

    def check(self) -> None:
        """Raise :class:`ScheduleError` for an unknown ZeRO stage or a negative `prefetch`."""
        if self.zero not in (0, 1, 2, 3):
            raise ScheduleError(f"replicas: zero {self.zero} is not 0, 1, 2 or 3")
        if self.prefetch < 0:
            raise ScheduleError(f"replicas: prefetch {self.prefetch} is negative")


REPLICAS = ReplicaPolicy()
"""Default policy of replicas in a simulation: ZeRO-1."""


def add_data_parallel_actions(
    program: Program,
    *,
    shared: Sequence[SharedReduction] = (),
    in_runs: bool,
    prefetch: int | None,
    unsplit: Collection[int] = (),
) -> Program:
    """Return `program` with REDUCE, ALLOC_GRADS, WAIT_WEIGHTS, UNSHARD and RESHARD actions.

    Args:
        shared: reductions of the stages that have several holders, one for each such stage.
        in_runs: for all other stages, whether each run of consecutive weight gradients has an
            ALLOC_GRADS before and a REDUCE after it (ZeRO-2 and 3). If not, there is one REDUCE.
        prefetch: number of stages whose weights are gathered ahead of use (ZeRO-3); None: weights
            are never freed.
        unsplit: stages whose ``I`` computes weight gradients too.
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
    """Yield the programs of a schedule's ranks with the data-parallel actions of `policy`."""
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
    """Return a rank's operations as a program without messages. It gets the same data-parallel
    actions (:func:`add_data_parallel_actions`) as the program with messages."""
    return Program(
        rank,
        tuple(Action(ActionKind.COMPUTE, *op[:4]) for op in schedule.rank_ops(rank)),
    )


def last_gradients(actions: Sequence[Action]) -> dict[int, int]:
    """Map the index of each REDUCE that follows a W or B of its stage to the index of that W or B.

    The W or B adds the last gradients, so the reduction can begin within it. Other REDUCEs are
    omitted: they follow another operation, because an I computes a head's weight gradient or the
    stage has several holders.
    """
    found, last = {}, -1
    for index, action in enumerate(actions):
        if action.do == ActionKind.COMPUTE:
            last = index
        elif action.do == ActionKind.REDUCE and last >= 0:
            before = actions[last]
            if before.stage == action.stage and before.kind in _ADDS_GRADIENTS:
                found[index] = last
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
    """Yield the actions with UNSHARD, WAIT_WEIGHTS and RESHARD added, so that the weights of the
    next 1 + `prefetch` different stages are gathered at any time."""
    uses: dict[int, list[int]] = defaultdict(list)
    for i in range(len(actions) - 1, -1, -1):
        if _needs_weights(actions[i]):
            uses[actions[i].stage].append(i)
    gathered: list[int] = []
    awaited: set[int] = set()
    held: list[Action] = []  # actions that wait, or take memory, until gathers have begun
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
