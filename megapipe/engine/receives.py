"""When a receive is posted: by default as early as can be, on NCCL shortly before it is needed.

A receive that is posted lets the message travel while the rank computes. On NCCL it is a kernel
that spins until its message is there: it takes a multiprocessor from the operations that run
meanwhile, and whatever waits for the whole device waits for it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from megapipe.schedule.program import Action, ActionKind


def posts(actions: Sequence[Action], ahead: int | None, stop: int) -> dict[int, list[int]]:
    """The channels, by peer, on which a receive is posted right before an action, by its index.

    A receive is posted before the operation that is `ahead` operations earlier in the program (as
    early as can be for None), but after the one before it on the same channel. A receive behind the
    first `stop` actions is not posted within them, as they may be undone. One that would be posted
    right before itself is not listed.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for index, peer, place in _places(actions, ahead):
        early = stop if place < stop <= index else place
        if early < index:
            found[early].append(peer)
    return found


def _places(actions: Sequence[Action], ahead: int | None) -> Iterator[tuple[int, int, int]]:
    """Each receive: its index, its peer, and the index before which it may be posted."""
    operations: list[int] = []
    after: dict[int, int] = defaultdict(int)
    for index, action in enumerate(actions):
        if action.do == ActionKind.COMPUTE:
            operations.append(index)
        elif action.do == ActionKind.RECV:
            place = index if ahead == 0 else 0
            if ahead and len(operations) >= ahead:
                place = operations[-ahead]
            yield index, action.peer, max(place, after[action.peer])
            after[action.peer] = index + 1
