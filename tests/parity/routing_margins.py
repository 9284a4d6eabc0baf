"""Choices that a run makes, and whether they fit its scores.

A choice is not continuous: in a narrow type another expert may come first than in fp64, and then
the gradient differs. So a run in fp32, bf16 or fp16 is compared with the reference under the
choices that the run made. These are compared with the reference's scores, within the error that the
plain computation in the same type has in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.routing import CHOICE
from megapipe.layers.moe.routing_noise import TokenNoise
from tests.parity.mixture import Told, choose, dropped_of, experts_of, has_experts

Found = list[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]
"""Layer, indices of tokens in the global batch, and their choices [tokens, k], ~expert for a
dropped one."""


@contextmanager
def recording(found: Callable[[], Found]) -> Iterator[None]:
    """Record every choice that a rank makes, once, in the list that `found` returns."""
    choice = RoutedExperts.route

    def recorded(
        self: RoutedExperts, logits: Tensor, p: Tensor, mb: MicroBatch, sequences: int, *rest: Any
    ) -> Any:
        again = self.layer in mb.scratch.by_layer(CHOICE)
        made = choice(self, logits, p, mb, sequences, *rest)
        if not again:
            shape = len(p) // sequences, sequences
            tokens = TokenNoise(mb, self.layer, shape, self._shards(mb, shape[0], p.device))
            numbers = tokens._numbers(p.device).cpu().numpy()
            found().append((self.layer, numbers, made.experts.cpu().numpy()))
        return made

    with mock.patch.object(RoutedExperts, "route", recorded):
        yield


def whole_choices(
    model: ModelConfig, samples: int, length: int, found: Sequence[Found]
) -> list[Tensor]:
    """Join the choices of all ranks, for each MoE layer [samples, length, k]. In validation there
    may be more, which fill up a micro-batch."""
    tokens, k = samples * length, model.moe.top_k
    layers = [layer for layer in range(model.layers) if has_experts(model, layer)]
    out = {layer: torch.full((tokens, k), 1 << 15, dtype=torch.int64) for layer in layers}
    for layer, numbers, choices in (each for of_rank in found for each in of_rank):
        here = numbers < tokens
        out[layer][torch.from_numpy(numbers[here])] = torch.from_numpy(choices[here]).long()
    for layer, choices in out.items():
        made = torch.where(choices < 0, ~choices, choices)
        assert (made < experts_of(model, layer)).all(), f"layer {layer}: a token has no choice"
    return [choices.view(-1, length, k) for choices in out.values()]


def check_choices(
    model: ModelConfig, exact: Told, plain: Told, noise: Mapping[tuple[str, int], Tensor] | None
) -> None:
    """Check that the choices given to both fit the exact scores, within twice the error of the
    plain computation. `noise` has the numbers by which second choices are kept."""
    layers = [layer for layer in range(model.layers) if has_experts(model, layer)]
    for i, given in enumerate(exact.given):
        layer = layers[i]
        made = torch.where(given < 0, ~given, given)
        ranked, weights = exact.ranked[i].double(), exact.weights[i].double()
        error = 2 * (plain.ranked[i].double() - ranked).abs().max()
        others = torch.ones_like(ranked).scatter(-1, made, -1.0)
        shifted = (ranked - error * others).flatten(0, 1).tolist()
        for scores, choice in zip(shifted, made.flatten(0, 1).tolist(), strict=True):
            assert sorted(choose(scores, model)) == sorted(choice), (
                f"layer {layer}: {choice} are not the choices of {scores}"
            )
        by_score = ranked.gather(-1, made)
        assert (by_score.diff(dim=-1) <= 2 * error).all(), "the best choice does not come first"
        error = 2 * (plain.weights[i].double() - weights).abs().max()
        shifted_weights = weights + error * torch.where(given < 0, -1.0, 1.0)
        drawn = None if noise is None else noise.get(("second", layer))
        wanted = dropped_of(made.tolist(), shifted_weights, drawn, model, ranked.shape[-1])
        found = {tuple(each) for each in (given < 0).nonzero().tolist()}
        assert found == wanted, f"layer {layer}: {found} are dropped, not {wanted}"
