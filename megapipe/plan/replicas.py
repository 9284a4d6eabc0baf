"""How often a process reduces gradients and gathers weights with its replicas in a step, counted in
the actions that :mod:`megapipe.schedule.data_parallel` puts into its programs."""

from collections.abc import Collection, Sequence

from megapipe.layout.layout import Layout
from megapipe.schedule.data_parallel import operations, with_zero_actions
from megapipe.schedule.program import Action, ActionKind


def replica_actions(layout: Layout, rank: int) -> list[list[Action]]:
    """Actions of a process between its operations, for each pipeline rank that it runs."""
    schedule = layout.schedule
    programs = with_zero_actions(
        (operations(schedule, own) for own in layout.process_ranks(rank)),
        schedule,
        layout.replicas,
    )
    return [
        [action for action in program.actions if action.do != ActionKind.COMPUTE]
        for program in programs
    ]


def reductions_of(programs: Sequence[Sequence[Action]], stage: int) -> int:
    """How often the gradients of a stage are reduced in a step."""
    return sum(
        (action.do, action.stage) == (ActionKind.REDUCE, stage)
        for own in programs
        for action in own
    )


def gathers_of(programs: Sequence[Sequence[Action]], users: Collection[int]) -> int:
    """How often ZeRO-3 gathers a bucket that the stages `users` compute with. While one of them has
    it, others need not gather it.

    Each of `programs` is counted by itself. Pipeline ranks in one process may have a tied bucket at
    the same time; then this is an upper bound.
    """
    count = 0
    for actions in programs:
        having = 0
        for action in actions:
            if action.stage in users and action.do == ActionKind.UNSHARD:
                count += having == 0
                having += 1
            elif action.stage in users and action.do == ActionKind.RESHARD:
                having -= 1
    return count
