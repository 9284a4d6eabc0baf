"""This process's position in a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from megapipe.watch.journal import CommCounter, unwatched


@dataclass(frozen=True)
class Axis:
    """A group of ranks as one member sees it: group size, index of this process, and member ranks.

    `group` is None if this process is the only member; then no collective is ever called.
    """

    size: int
    index: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    backend: str = "gloo"
    """torch's name of the group's backend. ``planned``: nothing is sent
    (:mod:`megapipe.distributed.planned`)."""
    line: CommCounter = field(default_factory=unwatched, compare=False, repr=False)
    """Journal counter that records when this process waits for the other members."""

    @classmethod
    def alone(cls, rank: int = 0) -> Axis:
        return cls(size=1, index=0, ranks=(rank,), group=None)
