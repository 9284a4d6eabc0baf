"""Programs: operations of a rank, its messages, and its collectives with replicas, in order.

:mod:`megapipe.schedule.lower` makes programs of schedules, the engine runs them, and the simulator
and the plan read them.
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
    """Begin to reduce the gradients of a stage."""
    ALLOC_GRADS = 4
    """Make room for the gradients of a stage."""
    UNSHARD = 5
    """Begin to gather the weights of a stage."""
    WAIT_WEIGHTS = 6
    """Wait until the weights of a stage are there."""
    RESHARD = 7
    """Let go of the gathered weights of a stage."""


class Action(NamedTuple):
    """One step of a rank's program.

    A message is named by what it carries, alike at both ends: kind F is the output of the forward
    of (stage, microbatch), for stage+1; kind I is the input gradient of its backward (I or B), for
    stage-1. Actions of data-parallel replicas name the stage alone
    (:mod:`megapipe.schedule.data_parallel`).
    """

    do: ActionKind
    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    peer: int = -1
    """The rank at the other end of a message."""
    acks: int = 0
    """On RECV: how many further sends of this rank to the peer the message acknowledges: those that
    the peer had received when it sent this message."""


@dataclass(frozen=True)
class Program:
    """Actions of one rank in a step, in order."""

    rank: int
    actions: tuple[Action, ...]
