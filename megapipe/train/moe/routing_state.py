"""State of routers from one step to the next: expert biases, and counts of choices.

An expert's bias is added to its score when choices are made. Each update changes the bias by a
fixed rate, so that the expert's choices approach the mean of its layer (DeepSeek-V3, 2412.19437).
An auxiliary loss over whole steps uses the counts of the previous step, as the current ones are not
known yet. It counts all choices, or only each token's first choice. Biases and counts depend on the
choices of the whole step, which are in the step's totals. So every rank has biases and counts of
all layers without communication. A step without an update leaves both unchanged.

With post-validation (:mod:`megapipe.train.step.post_validation`), an update at first changes only
biases and counts of local layers, whose choices are known before the totals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megapipe.checkpoint.regions import whole
from megapipe.checkpoint.stateful import TensorReader
from megapipe.checkpoint.writer import Piece
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.specs import bias_name, counts_name
from megapipe.model.interface import StageModule
from megapipe.ops.transfer import to_device
from megapipe.train.followers import Follower
from megapipe.train.moe.routing_stats import by_layer


class RoutingState(Follower):
    """Biases and counts of all MoE layers, copied to the layers in the local `stages`.

    `experts` has the number of experts by layer. Biases have the type `dtype`; without a
    `bias_rate` there are none. `counts`: whether to store the previous step's choices; with
    `first_only`, only first choices are counted.
    """

    def __init__(
        self,
        experts: Mapping[int, int],
        stages: Iterable[StageModule] = (),
        *,
        bias_rate: float | None = None,
        counts: bool = False,
        first_only: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._experts = experts
        self._rate = bias_rate
        self._first_only = first_only
        self._layers = [
            module
            for stage in stages
            for module in stage.modules()
            if isinstance(module, RoutedExperts)
        ]
        biased = {} if bias_rate is None else experts
        self.biases = {layer: torch.zeros(n, dtype=dtype) for layer, n in biased.items()}
        """Biases [experts] of each layer, on the host."""
        counted = experts if counts else {}
        self.counts = {n: torch.ones(e, dtype=torch.int64) for n, e in counted.items()}
        """Choices [experts] of each layer in the last step, on the host; spread evenly at first."""
        self._kept: list[Tensor] = []
        """Biases and counts before an update that is not validated."""

    def after_update(self, step: int, routing: Sequence[float]) -> None:
        """Update biases and counts with the choices of the step."""
        self.update(routing)

    def figures(self) -> dict[str, float]:
        """Return the largest absolute bias, if there are biases."""
        largest = self.max_bias
        return {} if largest is None else {"max_bias": largest}

    def update(self, routing: Sequence[float]) -> None:
        """Update biases and counts with a step's routing totals over all ranks."""
        self._move(routing, self._experts)
        self._hand_out()

    def update_speculatively(
        self, known: Iterable[tuple[Collection[int], Sequence[float]]]
    ) -> None:
        """Update local layers after an update that may be undone, with the routing totals of all
        ranks that have the layers."""
        for layers, routing in known:
            self._move(routing, layers)
        self._hand_out()

    def snapshot(self) -> None:
        """Save the state for :meth:`restore` or :meth:`confirm`."""
        self._kept = [values.clone() for _, values in self._named()]

    def restore(self) -> None:
        """Undo what :meth:`update_speculatively` has changed."""
        self._put_back()
        self._hand_out()

    def confirm(self, routing: Sequence[float]) -> None:
        """Update all layers with the routing totals of a validated step over all ranks. Local
        layers already have the new values, which forwards may have read."""
        self._put_back()
        self._move(routing, self._experts)

    def _put_back(self) -> None:
        for (_, values), kept in zip(self._named(), self._kept, strict=True):
            values.copy_(kept)

    def _move(self, routing: Sequence[float], layers: Collection[int]) -> None:
        if self.empty:
            return
        for layer, _, chosen, counted in by_layer(self._experts, routing):
            if layer not in layers:
                continue
            if self._rate is not None:
                counts = torch.tensor(chosen, dtype=torch.int64)
                bias, missing = self.biases[layer], counts.sum() - counts * len(counts)
                bias += self._rate * missing.sign().to(bias.dtype)
            if self.counts:
                self.counts[layer].copy_(torch.tensor(counted, dtype=torch.int64))

    @property
    def empty(self) -> bool:
        """Whether there are neither biases nor counts."""
        return not (self.biases or self.counts)

    @property
    def max_bias(self) -> float | None:
        """Largest absolute bias; None without biases."""
        return max((bias.abs().max().item() for bias in self.biases.values()), default=None)

    def tensors(self) -> Iterator[Piece]:
        """Yield biases, and counts of the last step."""
        for name, values in self._named():
            yield Piece(name, tuple(values.shape), whole(tuple(values.shape)), values)

    def entries(self) -> list[str]:
        """Return the names of biases and counts in a checkpoint."""
        return [name for name, _ in self._named()]

    def read_weights(self, weights: TensorReader) -> None:
        """Load biases, which belong to the weights."""
        self.read(weights, ())

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Load biases, which belong to the weights, and counts if they are among the stored
        `names`; else assume evenly spread choices. Raises CheckpointError."""
        for layer, bias in self.biases.items():
            weights.read_into(bias, bias_name(layer), whole(tuple(bias.shape)))
        for layer, counts in self.counts.items():
            counts.fill_(1)
            name = counts_name(layer, self._first_only)
            if name in names:
                weights.read_into(counts, name, whole(tuple(counts.shape)))
        self._hand_out()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for layer, bias in self.biases.items():
            yield bias_name(layer), bias
        for layer, counts in self.counts.items():
            yield counts_name(layer, self._first_only), counts

    def _hand_out(self) -> None:
        """Copy biases and counts to the local layers."""
        for module in self._layers:
            if module.bias is not None:
                module.bias.copy_(to_device(self.biases[module.layer], module.bias.device))
            if module.last is not None:
                counts = self.counts[module.layer].unsqueeze(0)
                module.last.copy_(to_device(counts, module.last.device))
