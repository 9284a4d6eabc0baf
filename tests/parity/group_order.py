"""The order in which groups are made: each waits until it is the next one of all its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist


class Made(NamedTuple):
    """A group that a process makes."""

    name: str
    members: tuple[int, ...]


def groups_made(world: int) -> list[Made]:
    """Return the groups that this process of `world` has made, in order, without the default
    group."""
    default, *groups = dist.distributed_c10d._world.pg_group_ranks.items()
    assert list(default[1]) == list(range(world))
    return [Made(group.group_name, tuple(ranks)) for group, ranks in groups]


def check_all_are_made(made: Sequence[Sequence[Made]]) -> None:
    """Check that all groups get made if each waits until it is the next one of all its members."""
    left = [list(reversed(groups)) for groups in made]
    going = set(range(len(made)))
    while going:
        rank = going.pop()
        while left[rank]:
            name, members = left[rank][-1]
            assert rank in members
            if any(left[other][-1:] != [Made(name, members)] for other in members):
                break
            for other in members:
                left[other].pop()
            going |= set(members) - {rank}
    waiting = {rank: groups[-1] for rank, groups in enumerate(left) if groups}
    assert not waiting, f"these wait for ever: {waiting}"
    for groups in made:
        assert len({group.name for group in groups}) == len(groups), "a name is used once"
