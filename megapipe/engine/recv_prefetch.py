"""When a receive is posted: by default as early as possible, on NCCL shortly before need.

A posted receive lets the message arrive while the rank computes. On NCCL a posted receive is a
kernel that spins until the message arrives: it takes a multiprocessor from concurrent operations,
and whatever waits for the whole device also waits for the receive.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from megapipe.schedule.program import Action, ActionKind


def posts(actions: Sequence[Action], ahead: int | None, stop: int) -> dict[int, list[int]]:
    """Return the peers whose receive is posted right before an action, by index of the action.

    A receive is posted before the operation that is `ahead` operations earlier (None: as early as
    possible), but after the channel's previous receive. The first `stop` actions can be undone, so
    receives of later actions are posted after them. Receives that are not early are omitted.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for index, peer, post_at in _post_indices(actions, ahead):
        early = stop if post_at < stop <= index else post_at
        if early < index:
            found[early].append(peer)
    return found


def _post_indices(actions: Sequence[Action], ahead: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield each receive's action index, its peer, and the index before which it is posted."""
    operations: list[int] = []
    after: dict[int, int] = defaultdict(int)
    for index, action in enumerate(actions):
        if action.do == ActionKind.COMPUTE:
            operations.append(index)
        elif action.do == ActionKind.RECV:
            post_at = index if ahead == 0 else 0
            if ahead and len(operations) >= ahead:
                post_at = operations[-ahead]
            yield index, action.peer, max(post_at, after[action.peer])
            after[action.peer] = index + 1
