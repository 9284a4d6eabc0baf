"""How often a process reduces gradients and gathers weights over its data-parallel group per step,
counted from the actions that :mod:`megapipe.schedule.data_parallel` adds to its programs."""

from collections.abc import Collection, Sequence

from megapipe.layout.layout import Layout
from megapipe.schedule.data_parallel import operations, with_zero_actions
from megapipe.schedule.program import Action, ActionKind


def replica_actions(layout: Layout, rank: int) -> list[list[Action]]:
    """Return the actions, without operations, of each pipeline rank that the process runs."""
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
    """Count how often the programs reduce the gradients of a stage in a step."""
    return sum(
        (action.do, action.stage) == (ActionKind.REDUCE, stage)
        for own in programs
        for action in own
    )


def gathers_of(programs: Sequence[Sequence[Action]], users: Collection[int]) -> int:
    """Count how often ZeRO-3 gathers a bucket that the stages `users` share. While the bucket is
    gathered for one stage, another stage does not gather it again.

    Each of `programs` is counted separately. If two pipeline ranks in one process hold the tied
    bucket at the same time, the count is an upper bound.
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
