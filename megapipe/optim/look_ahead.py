"""Weights predicted some updates ahead, from masters and states.

A step that computes its gradients with the weights of some updates later is less of a surprise to
the weights that it then changes (XGrad: Guan et al., 2305.18240), and hides a delay of gradients
(SpecTrain: Chen et al., 1809.02839). The prediction takes the last step again, so many times:
W - steps x lr x d. The direction d is the rule's (:meth:`megapipe.optim.rules.Rule.direction`).
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

    `distance` is the learning rate times the updates to look ahead. `count` updates were made:
    before the first there is no direction, and W is written.
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
