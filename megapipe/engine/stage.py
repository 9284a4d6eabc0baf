"""A stage and its operations: forward, recomputation, input gradient, weight gradient.

For each (micro-batch, slice) in flight the stage holds the input (whose ``.grad`` the backward
fills) and the *edge* of the output in the autograd graph, not the output itself: once sent, the
output's memory is free while its graph waits for the gradient. A stage that recomputes holds only
the input until it builds the graph for the backward (Chen et al., 1604.06174). In other stages,
policies decide what blocks save (:mod:`megapipe.layers.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import spec_of
from megapipe.layers.recompute import StageInput, run_backward
from megapipe.layers.weight_grad import WeightGradQueue, accumulate_in_main_grad
from megapipe.model.interface import Message, StageModule

Key = tuple[int, int]
"""(micro-batch, slice) as the schedule numbers them."""


_InFlight = tuple[Tensor | StageInput | None, GradientEdge | None]
"""Object that gets the input's gradient in the backward (None: the stage has no input), and the
edge of the output (None: the output depends on no parameter and no input)."""


class InFlight(NamedTuple):
    """State of a stage's work items in flight."""

    graphs: dict[Key, _InFlight]
    inputs: dict[Key, tuple[Message, MicroBatch]]
    caches: dict[int, KVCache]
    loss_sums: dict[Key, Tensor]


def _earlier(key: Key, by: int) -> Key:
    return key[0] - by, key[1]


class Stage:
    """Runs the ops of one virtual stage; `loss_sums` collects the last stage's losses.

    `spans` say which activations the blocks save, by default all that autograd saves. With
    `recompute` the forward builds no graph; ``R`` or the backward builds the graph from the input,
    and `spans` should save all that autograd saves. Random numbers are functions of coordinates, so
    recomputed values are bitwise equal.
    """

    def __init__(
        self, module: StageModule, spans: Sequence[BlockSpan] = (), *, recompute: bool = False
    ) -> None:
        self.module = module
        self.is_first = module.is_first
        self.is_last = module.is_last
        self.recomputes = recompute
        self._offloads_input = bool(spans) and spans[0].policy.offloads_input
        self._keeps_attention = any(span.policy.saves_attention for span in spans)
        if spans:
            module.set_policies(spans)
        self.queue: WeightGradQueue = module.queue
        self._in_flight: dict[Key, _InFlight] = {}
        self._inputs: dict[Key, tuple[Message, MicroBatch]] = {}
        self._caches: dict[int, KVCache] = {}
        self._unit: Tensor | None = None
        """Gradient of the loss with respect to itself (1), on the last stage."""
        self.loss_sums: dict[Key, Tensor] = {}
        """Sum of the unmasked token losses (nats) per (micro-batch, slice), on the last stage."""

    def route_autograd_grads(self) -> None:
        """Register hooks that add gradients computed by autograd itself to main gradients.

        Call this after the parameters have got their storage.
        """
        for parameter in self.module.parameters():
            spec = spec_of(parameter)
            if spec.grad_by_autograd and not spec.frozen:
                accumulate_in_main_grad(parameter)

    def begin(self, *, train: bool) -> None:
        """Start a step, with dropout if `train`; drop everything in flight."""
        if self.module.training != train:
            self.module.train(train)
        self._in_flight.clear()
        self._inputs.clear()
        self._caches.clear()
        self.loss_sums.clear()
        self.queue.clear()

    def cached_bytes(self) -> int:
        """Return the bytes of the key/value caches of the micro-batches in flight."""
        return sum(cache.nbytes() for cache in self._caches.values())

    def suspend_in_flight(self) -> InFlight:
        """Remove all work items in flight and return them for :meth:`restore_in_flight`. No weight
        gradient may be deferred at this time."""
        assert not self.queue.pending(), "weight gradients are not computed yet"
        kept = InFlight(self._in_flight, self._inputs, self._caches, self.loss_sums)
        self._in_flight, self._inputs, self._caches, self.loss_sums = {}, {}, {}, {}
        return kept

    def restore_in_flight(self, kept: InFlight, *, back: int = 0) -> None:
        """Continue with the work items `kept`. Micro-batch numbers are reduced by `back`, and
        losses whose number becomes negative are dropped."""
        self._in_flight = {_earlier(key, back): value for key, value in kept.graphs.items()}
        self._inputs = {_earlier(key, back): value for key, value in kept.inputs.items()}
        self._caches = {key - back: value for key, value in kept.caches.items()}
        losses = {_earlier(key, back): value for key, value in kept.loss_sums.items()}
        self.loss_sums = {key: value for key, value in losses.items() if key[0] >= 0}

    def forward(self, key: Key, x: Message, mb: MicroBatch) -> Message:
        """Run ``F``. Return the output for the next stage; on the last stage, None."""
        if not self.recomputes:
            return self._emit(key, self._build(key, x, mb))
        assert mb.sequence_length is None, "a stage that recomputes takes whole sequences only"
        if self._keeps_attention:
            mb = mb.storing_for_recompute()
        self._inputs[key] = x, mb
        with torch.no_grad():
            return self._emit(key, self.module(x, mb))

    @torch.no_grad()
    def evaluate(self, key: Key, x: Message, mb: MicroBatch) -> Message:
        """Run a forward without a graph, on whole sequences, for validation."""
        return self._emit(key, self.module(x, mb))

    def recompute(self, key: Key) -> None:
        """Run ``R``: recompute the forward, with a graph."""
        self._build(key, *self._inputs.pop(key), skip_output=True)

    def input_grad(self, key: Key, grad: Message) -> Message:
        """Run ``I``: back-propagate, queue the weight gradients, return the input's gradient.

        A stage with `recompute` recomputes first, unless an ``R`` has done so. The slices of a
        micro-batch come in descending order.
        """
        if key in self._inputs:
            self.recompute(key)
        x, edge = self._in_flight.pop(key)
        self.queue.open(key)
        if edge is not None:
            grad = self._unit if grad is None else grad
            run_backward((edge,), (grad,), False, False, (), True, True)
        if key[1] == 0 and self._caches:
            del self._caches[key[0]]
        if x is None:
            return None
        grad, x.grad = x.grad, None
        if grad is None and isinstance(x, Tensor):  # the output does not depend on x
            return torch.zeros_like(x)
        return grad

    def weight_grad(self, key: Key) -> None:
        """Run ``W``: compute the weight gradients that ``I`` has queued; they need no graph."""
        self.queue.run(key)

    def backward(self, key: Key, grad: Message) -> Message:
        """Run ``B``: ``I`` and ``W``, with weight gradients computed while the graph is walked."""
        self.queue.at_once = True
        grad = self.input_grad(key, grad)
        self.queue.at_once = False
        self.weight_grad(key)
        return grad

    def _build(self, key: Key, x: Message, mb: MicroBatch, *, skip_output: bool = False) -> Message:
        """Run a forward with a graph, and hold the graph's two ends for the backward."""
        source: Tensor | StageInput | None = None
        if x is not None and self._offloads_input:
            source = StageInput()
            x = source.of(x)
        elif x is not None:
            source = x = x.detach().requires_grad_()
        cache = self._cache_of(key, mb) if key[1] or mb.sequence_length is not None else None
        y = self.module(x, mb, cache, skip_output=skip_output)
        root = y * mb.scale if self.is_last else y
        edge = get_gradient_edge(root) if root.requires_grad else self._no_edge()
        self._in_flight[key] = source, edge
        return y.detach()

    def _no_edge(self) -> GradientEdge | None:
        """Return None as the edge of an output without a gradient; raise on the last stage."""
        if self.is_last:
            raise ConfigError(
                "the loss has no gradient: it must depend on a parameter or on the input of "
                "the last stage"
            )
        return None

    def _cache_of(self, key: Key, mb: MicroBatch) -> KVCache:
        microbatch, slice_ = key
        length = mb.sequence_length
        assert length is not None, f"slice {slice_} is of a sequence whose length is not given"
        if slice_ == 0:
            self._caches[microbatch] = KVCache(length)
        return self._caches[microbatch]

    def _emit(self, key: Key, y: Message) -> Message:
        if not self.is_last:
            return y
        self._unit = torch.ones_like(y) if self._unit is None else self._unit
        self.loss_sums[key] = y
        return None
