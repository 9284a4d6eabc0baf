"""A process' place in a group."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from megapipe.watch.journal import CommCounter, unwatched


@dataclass(frozen=True)
class Axis:
    """This process' place in a group: its size, its own index, and who the members are.

    `group` is None where the process is alone, and then no collective is ever called.
    """

    size: int
    index: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    backend: str = "gloo"
    """The group's, as torch calls it; ``planned`` where nothing is sent
    (:mod:`megapipe.distributed.planned`)."""
    line: CommCounter = field(default_factory=unwatched, compare=False, repr=False)
    """Where this process notes that it waits for the others."""

    @classmethod
    def alone(cls, rank: int = 0) -> Axis:
        return cls(size=1, index=0, ranks=(rank,), group=None)
