"""Programs: the operations, messages and data-parallel collectives of a rank, in order.

:mod:`megapipe.schedule.lower` makes programs from schedules, the engine runs programs, and the
simulator and the plan read programs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from megapipe.schedule.ir import Kind


class ActionKind(IntEnum):
    """Kinds of actions."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    REDUCE = 3
    """Start to reduce the gradients of a stage over data-parallel replicas."""
    ALLOC_GRADS = 4
    """Allocate memory for the gradients of a stage."""
    UNSHARD = 5
    """Start the all-gather of the weights of a stage."""
    WAIT_WEIGHTS = 6
    """Wait for the all-gather of the weights of a stage."""
    RESHARD = 7
    """Free the gathered weights of a stage."""


class Action(NamedTuple):
    """One entry of a rank's program.

    The fields of SEND and RECV name the operation that makes the message. Kind F: the output of
    the forward of (stage, microbatch), which stage+1 needs. Kind I: the input gradient of the
    backward (I or B) of (stage, microbatch), which stage-1 needs. Data-parallel actions use only
    the stage (:mod:`megapipe.schedule.data_parallel`).
    """

    do: ActionKind
    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    peer: int = -1
    """The rank at the other end of a message."""
    acks: int = 0
    """For a RECV: number of this rank's sends that the message acknowledges. The peer had received
    these sends when it sent the message, and no earlier message acknowledged them."""


@dataclass(frozen=True)
class Program:
    """Actions of one rank in a step, in order."""

    rank: int
    actions: tuple[Action, ...]
