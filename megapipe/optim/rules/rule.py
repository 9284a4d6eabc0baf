"""The base of update rules: the ranges of a shard that they walk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import DeclaredRule
from megapipe.layers.parameter import LocalParameter
from megapipe.ops.adam import AdamKernel
from megapipe.optim.buffers import ParamRange

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard


CPU_BLOCK = 1 << 17
GPU_BLOCK = 1 << 24


class Range(NamedTuple):
    """A range [start, stop) of a shard's arrays whose parameters decay, or do not."""

    start: int
    stop: int
    decay: bool


class StateSlice(NamedTuple):
    """A range of a shard in memory: flat tensors of one length, all changed in place."""

    master: Tensor
    grad: Tensor
    """The gradient, and scratch."""
    states: tuple[Tensor, ...]
    weight_decay: float

    def blocks(self) -> Iterator[StateSlice]:
        """The part in blocks, so that temporaries are small."""
        for here in blocks(0, len(self.master), self.master.device):
            yield self.cut(here.start, here.stop)

    def cut(self, start: int, stop: int) -> StateSlice:
        """The values [start, stop) of it."""
        here = slice(start, stop)
        states = tuple(state[here] for state in self.states)
        return StateSlice(self.master[here], self.grad[here], states, self.weight_decay)


def blocks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The range [start, stop) in blocks; those of a CPU stay in its cache."""
    length = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    for first in range(start, stop, length):
        yield slice(first, min(first + length, stop))


class Rule(DeclaredRule, ABC):
    """Updates the master weights of shards from their gradients, in place.

    `kernel` does the steps of Adam.
    """

    def __init__(self, config: OptimizerConfig, kernel: AdamKernel) -> None:
        self.config = config
        self.kernel = kernel

    @property
    def states(self) -> tuple[str, ...]:
        """States kept for each weight from step to step."""
        return self.declaration.kept(self.config.momentum)

    @abstractmethod
    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        """Take one step, after `count` earlier ones.

        Every member of a shard's axis, and of the axis `tp` of those that hold other parts of its
        tensors, calls it with its shards of the same buckets, in the same order. Gradients may be
        overwritten.
        """

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """The direction of the last of `count` steps again, from what it left: flat, [n].

        A step at learning rate lr subtracts about lr times the direction, and its decay.
        ``optimizer.look_ahead`` asks for it where the declaration says that there is one; `count`
        is above 0. What is given stays as it is.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no direction")

    def decay_of(self, range_: Range) -> float:
        """The weight decay of a range."""
        return self.config.weight_decay if range_.decay else 0.0

    def parts(self, shard: Shard, ranges: Iterable[Range]) -> Iterator[StateSlice]:
        """The `ranges` with gradients and states, cut into the windows of the shard's store."""
        for range_ in ranges:
            weight_decay = self.decay_of(range_)
            for window in shard.store.windows(range_.start, range_.stop):
                grad = shard.grad[window.start : window.stop]
                yield StateSlice(window.master, grad, window.states, weight_decay)


def overlap(shard: Shard, entry: ParamRange) -> Range:
    """The range of a parameter in the shard, from the shard's start; stop <= start if empty."""
    start = max(entry.start, shard.start) - shard.start
    stop = min(entry.stop, shard.stop) - shard.start
    return Range(start, stop, entry.spec.decay)


def ranges(shard: Shard, wanted: Callable[[LocalParameter], bool] | None = None) -> list[Range]:
    """Where the parameters lie in the shard, in the order of its segments; or the `wanted` ones, of
    which neighbours that decay alike are one range."""
    if wanted is None:
        first = shard.start
        return [Range(s.start - first, s.stop - first, s.decay) for s in shard.segments]
    found: list[Range] = []
    for entry in shard.bucket.entries:
        here = overlap(shard, entry)
        if here.start >= here.stop or not wanted(entry.spec):
            continue
        if found and found[-1].stop == here.start and found[-1].decay == here.decay:
            found[-1] = found[-1]._replace(stop=here.stop)
        else:
            found.append(here)
    return found
