"""The tasks of one direction of a layer with experts, in chunks.

A forward passes through these steps, and so does an input gradient, of which gradients of outputs
travel to the experts and gradients of rows back::

    encode -> dispatch -> decode -> experts -> combine

Rows are put in the order of their ranks (encode), travel to those of their experts (dispatch), are
put in the order of experts there (decode), are multiplied (experts) and travel back (combine). An
exchange over several nodes may be two hops, each a step: within nodes and between them. Dispatch
cuts the rows into chunks, and while one travels another can be computed. Sums of dense gradients
(reduce) are on the same links; nothing here waits for them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

What = Literal["encode", "dispatch", "decode", "experts", "combine", "reduce"]
Resource = Literal["compute", "node", "network"]
"""A device, its link to others of its node, and its link to other nodes. Each does one task at a
time, and finishes what it has begun."""

EXCHANGES = ("dispatch", "combine")


class Step(NamedTuple):
    """A step that all rows of a layer take."""

    what: What
    resource: Resource
    seconds: float
    """Of all rows."""
    latency: float = 0.0
    """Seconds beside that for each chunk, however small."""
    at_once: bool = False
    """A first step of all rows together, before any chunk."""


class Task(NamedTuple):
    """A step of a chunk, or a piece of a reduction."""

    what: What
    chunk: int
    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    """The tasks, by their places in the list, that are done before it begins."""


def chunked(steps: Sequence[Step], chunks: int) -> list[Task]:
    """The tasks of so many equal chunks.

    Chunks are alike, so in each step they come one after the other: with two of them exchanged
    nothing would end earlier.
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
