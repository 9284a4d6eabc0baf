"""Base class of update rules, and the ranges of a shard that rules update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import DeclaredRule, RuleOptions
from megapipe.layers.parameter import LocalParameter
from megapipe.ops.adam import AdamKernel
from megapipe.optim.buffers import ParamRange

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard


CPU_BLOCK = 1 << 17
GPU_BLOCK = 1 << 24


class Range(NamedTuple):
    """A range [start, stop) of a shard's arrays that weight decay covers fully or not at all."""

    start: int
    stop: int
    decay: bool


class StateSlice(NamedTuple):
    """Masters, gradients and states of a range of a shard: flat, equally long, updated in place."""

    master: Tensor
    grad: Tensor
    """Gradient, which a rule may overwrite."""
    states: tuple[Tensor, ...]
    weight_decay: float

    def blocks(self) -> Iterator[StateSlice]:
        """Yield the slice in blocks, so that temporaries are small."""
        for here in blocks(0, len(self.master), self.master.device):
            yield self.cut(here.start, here.stop)

    def cut(self, start: int, stop: int) -> StateSlice:
        """Return the values [start, stop) of the slice."""
        here = slice(start, stop)
        states = tuple(state[here] for state in self.states)
        return StateSlice(self.master[here], self.grad[here], states, self.weight_decay)


def blocks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """Yield the range [start, stop) in blocks; on a CPU, a block fits the cache."""
    length = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    for first in range(start, stop, length):
        yield slice(first, min(first + length, stop))


class Rule(DeclaredRule, ABC):
    """Updates the master weights of shards from their gradients, in place.

    `kernel` computes Adam steps.
    """

    options: RuleOptions
    """Values of ``optimizer.options``; the rule's declaration names their class."""

    def __init__(self, config: OptimizerConfig, kernel: AdamKernel) -> None:
        self.config = config
        self.options = config.rule_options
        self.kernel = kernel

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states stored for each weight from step to step."""
        return self.declaration.kept(self.options)

    @abstractmethod
    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        """Update the weights after `count` earlier updates; gradients may be overwritten.

        Collective over a shard's `axis` and its `tp` (ranks with other parts of the same tensors):
        all ranks call it, with their shards of the same buckets, in the same order.
        """

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return the direction of the last of `count` steps, from the state after it: flat, [n].

        A step at learning rate lr subtracts about lr x direction. ``optimizer.weight_prediction``
        calls this with `count` above 0, if the rule declares that it has a direction. The arguments
        are not changed.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no direction")

    def decay_of(self, range_: Range) -> float:
        """Return the weight decay of a range."""
        return self.config.weight_decay if range_.decay else 0.0

    def parts(self, shard: Shard, ranges: Iterable[Range]) -> Iterator[StateSlice]:
        """Yield `ranges` with masters, gradients and states, cut into the store's state windows."""
        for range_ in ranges:
            weight_decay = self.decay_of(range_)
            for window in shard.store.windows(range_.start, range_.stop):
                grad = shard.grad[window.start : window.stop]
                yield StateSlice(window.master, grad, window.states, weight_decay)


def overlap(shard: Shard, entry: ParamRange) -> Range:
    """Return the range of a parameter in the shard, counted from the shard's start; stop <= start
    if the parameter does not overlap the shard."""
    start = max(entry.start, shard.start) - shard.start
    stop = min(entry.stop, shard.stop) - shard.start
    return Range(start, stop, entry.spec.decay)


def ranges(shard: Shard, wanted: Callable[[LocalParameter], bool] | None = None) -> list[Range]:
    """Return the ranges of the shard's segments, in order. With `wanted`, return the ranges of the
    parameters that it accepts; adjacent ranges with equal decay are merged."""
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
