"""A small family without layers of the package: each token alone, through one matrix.

The embedding is the matrix E [V, h] itself, a layer is x + sin(x W), the head is E2 [h, V].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding, new_parameter
from megapipe.layers.specs import ParameterSpec
from megapipe.model.interface import (
    Feature,
    ModelSpec,
    RunShape,
    TensorShape,
    UniformRecompute,
    Work,
    main_tensor,
)
from megapipe.model.partition import StageSpec
from megapipe.util.dtypes import Dtype


@dataclass(frozen=True)
class Tiny(ModelSpec):
    """A model spec with ``model.options``: width and depth."""

    name = "Tiny"
    has_embedding_and_head = True

    width: int
    depth: int
    own_dtype: Dtype
    vocabulary: int | None
    conditions: RunShape

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        dtype: Dtype,
        vocab_size: int | None,
        conditions: RunShape,
    ) -> Self:
        if set(options) != {"width", "depth"}:
            raise ConfigError(f"model.options: Tiny takes width and depth, not {sorted(options)}")
        return cls(options["width"], options["depth"], dtype, vocab_size, conditions)

    @property
    def supports(self) -> Collection[Feature]:
        return ("loss_chunk",)

    @property
    def dtype(self) -> Dtype:
        return self.own_dtype

    @property
    def vocab_size(self) -> int | None:
        return self.vocabulary

    @property
    def layers(self) -> int:
        return self.depth

    def check(self) -> None:
        if self.width % 2:
            raise ConfigError(f"model.options.width={self.width} is odd")

    def parameters(self, stage: StageSpec) -> Iterator[ParameterSpec]:
        def matrix(name: str, *shape: int) -> ParameterSpec:
            return ParameterSpec(name=name, shape=shape, decay=True, std=0.3, grad_by_autograd=True)

        vocabulary = self.vocabulary or 2
        if stage.embedding:
            yield matrix("first", vocabulary, self.width)
        for layer in stage.layers:
            yield matrix(f"inner.{layer}", self.width, self.width)
        if stage.head:
            yield matrix("last", self.width, vocabulary)

    def describe(self) -> str:
        return f"tiny, {self.depth} layers of width {self.width}"

    def unit_costs(self, repeated: UniformRecompute | None) -> Sequence[int]:
        return [0, *[6 * self.width**2] * self.depth, 6 * self.width * (self.vocabulary or 2)]

    def forward_flops(self, stage: StageSpec) -> int:
        head = stage.head * 2 * self.width * (self.vocabulary or 2)
        return len(stage.layers) * 2 * self.width**2 + head

    def reference_layer_flops(self) -> int:
        return 2 * self.width**2

    def work(self, stage: StageSpec, spans: Sequence[BlockSpan], *, recompute: bool) -> Work:
        flops = self.forward_flops(stage)
        return Work(F=flops, I=2 * flops, W=0, R=recompute * flops)

    def output_shape(self, stage: StageSpec, rows: int, length: int) -> tuple[TensorShape, ...]:
        return (main_tensor((rows, length, self.width), self.dtype),)

    def build(self, stage: StageSpec, sharding: Sharding) -> TinyStage:
        return TinyStage(list(self.parameters(stage)), stage, sharding)


class TinyStage(nn.Module):
    """The matrices of a stage, in order."""

    def __init__(
        self, parameters: Sequence[ParameterSpec], stage: StageSpec, sharding: Sharding
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = stage.embedding, stage.head
        self.queue = sharding.queue
        self.matrices = nn.ParameterList([new_parameter(sharding, spec) for spec in parameters])

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        assert not any(span.policy.recompute or span.policy.offload for span in spans)

    def forward(
        self, x: Any, mb: MicroBatch, cache: Any = None, *, skip_output: bool = False
    ) -> Tensor:
        logits = run_tiny(list(self.matrices), x, mb.tokens if self.is_first else None)
        return loss_of(logits, mb.labels, mb.mask) if self.is_last else logits

    def logits(self, x: Any, mb: MicroBatch, cache: Any = None, *, last: bool = False) -> Tensor:
        raise NotImplementedError


def run_tiny(matrices: Sequence[Tensor], x: Any, tokens: Tensor | None) -> Tensor:
    """Pass tokens or x through matrices. With tokens the first one is the embedding; one that is
    not square is the head."""
    matrices = list(matrices)
    if tokens is not None:
        x = matrices.pop(0)[tokens]
    for matrix in matrices:
        square = matrix.shape[0] == matrix.shape[1]
        x = x + torch.sin(x @ matrix) if square else x @ matrix
    return x


def loss_of(logits: Tensor, labels: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the sum of the unmasked token losses."""
    assert labels is not None
    assert mask is not None
    picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(picked * mask).sum()
