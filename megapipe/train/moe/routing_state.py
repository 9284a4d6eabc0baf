"""Biases and counts of choices, which layers with experts keep from one step to the next.

An expert's bias is added to its score where experts are chosen. Each update moves it by a fixed
rate, towards as many choices as the mean of its layer (DeepSeek-V3, 2412.19437). A balance term
over whole steps goes by the choices of the last one, or by the first one of each token, as those of
its own are not known yet. Both follow from the choices of the whole step, which are in its totals;
so every rank has those of all layers alike and nothing is exchanged for it. A step without an
update leaves both as they are.

An update that is validated later (:mod:`megapipe.train.step.post_validation`) moves those of the
layers here, whose choices are known ahead of the totals; the others follow with these.
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
from megapipe.train.moe.routing import by_layer


class RoutingState(Follower):
    """Of all layers with experts, of which each has so many `experts`; the `stages` of this process
    are given theirs.

    Without a `bias_rate` there are no biases, which are of the type `dtype`. `counts`: the choices
    of the last step are kept, with `first_only` the first one of each token.
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
        """By layer, [experts], on the host."""
        counted = experts if counts else {}
        self.counts = {n: torch.ones(e, dtype=torch.int64) for n, e in counted.items()}
        """By layer, [experts], on the host: those choices of the last step; spread evenly
        at first."""
        self._kept: list[Tensor] = []
        """The same before an update that is not validated."""

    def after_update(self, step: int, routing: Sequence[float]) -> None:
        """Move by the choices of the step."""
        self.update(routing)

    def figures(self) -> dict[str, float]:
        """Return the largest size of a bias, if there are some."""
        largest = self.largest_bias
        return {} if largest is None else {"largest_bias": largest}

    def update(self, told: Sequence[float]) -> None:
        """After the update of a step of which all ranks together have `told`."""
        self._move(told, self._experts)
        self._hand_out()

    def update_speculatively(
        self, known: Iterable[tuple[Collection[int], Sequence[float]]]
    ) -> None:
        """After an update that may be undone, with layers here and what is told of their choices by
        all who have them."""
        for layers, told in known:
            self._move(told, layers)
        self._hand_out()

    def snapshot(self) -> None:
        """Keep what there is for :meth:`restore` or :meth:`confirm`."""
        self._kept = [values.clone() for _, values in self._named()]

    def restore(self) -> None:
        """Take back what has moved ahead."""
        self._put_back()
        self._hand_out()

    def confirm(self, told: Sequence[float]) -> None:
        """Move all layers by what all ranks together have `told` of the step of an update that
        holds. The layers here have theirs already; forwards may have begun with it."""
        self._put_back()
        self._move(told, self._experts)

    def _put_back(self) -> None:
        for (_, values), kept in zip(self._named(), self._kept, strict=True):
            values.copy_(kept)

    def _move(self, told: Sequence[float], layers: Collection[int]) -> None:
        if self.empty:
            return
        for layer, _, chosen, counted in by_layer(self._experts, told):
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
        """Whether nothing is kept from step to step."""
        return not (self.biases or self.counts)

    @property
    def largest_bias(self) -> float | None:
        """The largest size of a bias; None: there are none."""
        return max((bias.abs().max().item() for bias in self.biases.values()), default=None)

    def tensors(self) -> Iterator[Piece]:
        """Yield biases, and counts of the last step."""
        for name, values in self._named():
            yield Piece(name, tuple(values.shape), whole(tuple(values.shape)), values)

    def entries(self) -> list[str]:
        """Return the names of their entries."""
        return [name for name, _ in self._named()]

    def read_weights(self, weights: TensorReader) -> None:
        """Take over biases."""
        self.read(weights, ())

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Take over biases, which belong to the weights, and counts if they are among the `names`
        of what is there; else choices are taken as spread evenly. Raises CheckpointError."""
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
        """Give the layers here theirs."""
        for module in self._layers:
            if module.bias is not None:
                module.bias.copy_(to_device(self.biases[module.layer], module.bias.device))
            if module.last is not None:
                counts = self.counts[module.layer].unsqueeze(0)
                module.last.copy_(to_device(counts, module.last.device))
