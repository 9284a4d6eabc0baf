"""The tasks of one direction of an MoE layer, in chunks.

A forward passes through these steps. So does an input gradient: gradients of outputs are dispatched
to the experts, and gradients of rows combined::

    encode -> dispatch -> decode -> experts -> combine

Rows are ordered by rank (encode), sent to the ranks of their experts (dispatch), ordered by expert
on these ranks (decode), multiplied (experts) and sent back (combine). An exchange over several
nodes can be two steps: within nodes and between nodes. Dispatch splits the rows into chunks, and
while one chunk is in flight another can be computed. Reductions of dense gradients (reduce) use the
same links; no task waits for them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

What = Literal["encode", "dispatch", "decode", "experts", "combine", "reduce"]
Resource = Literal["compute", "node", "network"]
"""A device, its link to other devices of the node, or its link to other nodes. A resource runs one
task at a time, and never interrupts a task."""

EXCHANGES = ("dispatch", "combine")


class Step(NamedTuple):
    """A step of a layer, for all its rows."""

    what: What
    resource: Resource
    seconds: float
    """Seconds for all rows of the layer."""
    latency: float = 0.0
    """Additional seconds for each chunk, independent of its size."""
    at_once: bool = False
    """Whether the step handles all rows together, before any chunk begins; else chunk by chunk."""


class Task(NamedTuple):
    """A step of a chunk, or a bucket of a reduction."""

    what: What
    chunk: int
    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    """Indices, in the list of tasks, of the tasks that must end before this task begins."""


def chunked(steps: Sequence[Step], chunks: int) -> list[Task]:
    """Return the tasks of a layer whose rows are split into `chunks` equal chunks.

    Every step handles the chunks in the same order: they are equal, so another order would not end
    any earlier.
    """
    tasks: list[Task] = []
    for step in (step for step in steps if step.at_once):
        own = (len(tasks) - 1,) if tasks else ()
        tasks.append(Task(step.what, 0, step.resource, step.seconds + step.latency, own))
    in_chunks = [step for step in steps if not step.at_once]
    ahead = (len(tasks) - 1,) if tasks else ()
    for chunk in range(chunks):
        for number, step in enumerate(in_chunks):
            here = len(tasks)
            own = (here - 1,) if number else ahead
            before = (here - len(in_chunks),) if chunk else ()
            seconds = step.seconds / chunks + step.latency
            tasks.append(Task(step.what, chunk, step.resource, seconds, own + before))
    return tasks
