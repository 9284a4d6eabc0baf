"""The mean velocity of weights, from which earlier versions of the weights are estimated.

When a backward runs, the weights that its forward has read may be gone. The backward then reads an
estimate, T2 of PipeMare (Yang et al., 1910.05124): W - tau x delta, where tau is the mean number of
updates since that forward. The velocity delta is a state next to the masters; each update does

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
"""The constant D, as in PipeMare."""


def decay(correction: float | None, updates: Fraction) -> float:
    """Return gamma. `correction`: D, by default PipeMare's. `updates`: tau, above 0."""
    return float((CORRECTION if correction is None else correction) ** (1 / updates))


@contextmanager
def followed(shards: Sequence[Shard], decays: Mapping[int, float]) -> Iterator[None]:
    """Enter a context in which the caller updates `shards`; their velocities are updated too.
    `decays` has gamma by bucket index, for each bucket with a velocity.

    The old masters are added to the velocity before the update, the new ones after it, so that the
    old ones need not be copied. Sums are rounded in the type of masters.
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
    """Yield slices with views of masters and velocities, block by block."""
    store, length = shard.store, shard.stop - shard.start
    master, velocity = (store.read(name, 0, length) for name in (MASTER, VELOCITY))
    for here in blocks(0, length, master.device):
        yield here, master[here], velocity[here]
        store.release(here.start, here.stop)
