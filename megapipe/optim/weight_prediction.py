"""Weight prediction: estimates weights some updates ahead from masters and states.

Gradients computed with predicted weights make better updates (XGrad: Guan et al., 2305.18240), and
compensate for staleness (SpecTrain: Chen et al., 1809.02839). The prediction repeats the last step
`steps` times: W - steps x lr x d. The update rule gives the direction d
(:meth:`megapipe.optim.rules.Rule.direction`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megapipe.optim.rules.rule import Rule, blocks, ranges
from megapipe.optim.state_store import MASTER

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard


def predict(rule: Rule, shard: Shard, distance: float, count: int, out: Tensor) -> None:
    """Write W - `distance` x d into `out` [stop - start], in its type; W are the shard's masters.

    `distance` is the learning rate times the number of updates to predict. `count` is the number of
    updates so far; before the first one there is no direction, and W is written.
    """
    for range_ in ranges(shard):
        decay = rule.decay_of(range_)
        for here in blocks(range_.start, range_.stop, out.device):
            master, *states = (
                shard.store.read(name, here.start, here.stop) for name in (MASTER, *rule.states)
            )
            if count:
                direction = rule.direction(master, states, decay, count)
                master = master.sub(direction, alpha=distance)
            out[here].copy_(master)
