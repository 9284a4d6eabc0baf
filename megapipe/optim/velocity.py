"""How far weights go in an update, on average: by it they are moved back to where they were.

A backward whose forward has read older weights, and which finds these gone, can guess them: T2 of
PipeMare (Yang et al., 1910.05124) reads W - tau x delta, tau being the mean number of updates in
between. The velocity delta is kept beside the masters: in each update

    delta <- gamma x delta + (1 - gamma) x (W_new - W_old), gamma = D^(1/tau).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapipe.optim.rules.rule import blocks
from megapipe.optim.state_store import MASTER, VELOCITY

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard

CORRECTION = math.exp(-2)
"""D, as in PipeMare."""


def decay(correction: float | None, updates: Fraction) -> float:
    """gamma of weights that are moved back by so many `updates`, above 0; `correction` is D."""
    return float((CORRECTION if correction is None else correction) ** (1 / updates))


@contextmanager
def followed(shards: Sequence[Shard], decays: Mapping[int, float]) -> Iterator[None]:
    """A context in which `shards` are updated, and their velocities follow; `decays` has gamma by
    bucket, of those that keep one.

    The old masters are taken into the velocity before the update, and the new ones after it, so
    that no copy of them is needed. Rounding is that of masters.
    """
    moving = [(shard, decays[i]) for shard in shards if (i := shard.bucket.index) in decays]
    for shard, gamma in moving:
        for _, master, velocity in _pieces(shard):
            velocity.mul_(gamma).sub_(master, alpha=1.0 - gamma)
    yield
    for shard, gamma in moving:
        for _, master, velocity in _pieces(shard):
            velocity.add_(master, alpha=1.0 - gamma)


def predict_older_weights(shard: Shard, updates: float, out: Tensor) -> None:
    """Write W - `updates` x delta into `out` [stop - start], in its type; W are the masters."""
    for here, master, velocity in _pieces(shard):
        out[here].copy_(torch.sub(master, velocity, alpha=updates))


def _pieces(shard: Shard) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Places, masters and velocities, block by block, where they are kept."""
    store, length = shard.store, shard.stop - shard.start
    master, velocity = (store.read(name, 0, length) for name in (MASTER, VELOCITY))
    for here in blocks(0, length, master.device):
        yield here, master[here], velocity[here]
        store.release(here.start, here.stop)
