"""A process' place in a group."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """This process' place in a group: its size, its own index, and who the members are.

    `group` is None where the process is alone, and then no collective is ever called.
    """

    size: int
    index: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None

    @classmethod
    def alone(cls, rank: int = 0) -> Axis:
        return cls(size=1, index=0, ranks=(rank,), group=None)
