"""Schedules for torch.distributed.pipelining.

Its compute-only CSV is read by :func:`megapipe.schedule.text.from_csv`. Ours is written here, for
the ``_load_csv`` of its schedule runtime, which adds the messages by rules of its own.
"""

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Schedule
from megapipe.schedule.text import to_csv


def to_torch_csv(schedule: Schedule) -> str:
    """The compute-only CSV of a valid schedule, as torch's runtime takes it.

    Operations that run as one become OVERLAP_F_B, which torch runs one after the other unless
    it is given a function for it.

    Raises:
        ScheduleError: the schedule has something that torch's runtime does not know.
    """
    for present, what in (
        (schedule.forward_only, "a schedule without backward"),
        (len(schedule.placement.table) > 1, "replicas of the model"),
        (schedule.slices > 1, "slices of a sequence"),
        (schedule.sizes is not None, "micro-batches of unequal size"),
        (schedule.recompute, "recomputation by the schedule"),
    ):
        if present:
            raise ScheduleError(
                f"schedule {schedule.name}: torch.distributed.pipelining cannot run {what}; it "
                "knows F, B, I and W of whole micro-batches, each stage on one rank"
            )
    return to_csv(schedule)
