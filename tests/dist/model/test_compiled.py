"""Blocks that inductor compiles, by a compiler and processes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megapipe.engine.stage import Stage
from megapipe.errors import ConfigError
from megapipe.layers.linear import LinearTask
from megapipe.model.gpt import compiled
from megapipe.model.gpt.block import Block
from megapipe.ops.compiler import torch_compile
from tests.parity.compiled_stages import (
    SPLIT,
    Traced,
    assert_close,
    assert_like_uncompiled,
    check,
    model_of,
    run,
    stage_of,
    without_graphs,
)

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    with without_graphs():
        yield


@pytest.mark.slow
def test_every_gradient_under_inductor() -> None:
    """The model has eight linear layers with biases, gates and rotary embeddings."""
    assert_like_uncompiled(model_of("mixed", "fp32"), torch_compile, 1e-5)


def two_in_one_graph(stage: Stage) -> None:
    """Let inductor see the stage's two blocks as one function of eight linear layers."""
    first, second = (cast(Block, block) for block in stage.module.layers)

    def both(x: Tensor, rotary: Any, linears: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, inputs = compiled.run_block(first, x, rotary, None, linears[:4], False)
        z, others = compiled.run_block(second, y, rotary, None, linears[4:], False)
        return z, (*inputs, *others)

    graph = torch_compile(both)
    layers = [
        layer
        for block in (first, second)
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down)
    ]

    def run_both(_block: Any, x: Tensor, _mb: Any, rotary: Any, _graph_only: bool) -> Tensor:
        harvest = compiled._Harvest(layers)
        sinks = compiled._Sinks.apply(x.new_empty(0).requires_grad_(), harvest, x)
        linears = [compiled._linear(*both) for both in zip(layers, sinks, strict=True)]
        y, harvest.inputs = graph(x, rotary, linears)
        return y

    def run_none(_block: Any, x: Tensor, *_rest: Any) -> Tensor:
        return x

    first.compiled, second.compiled = run_both, run_none


@pytest.mark.slow
def test_eight_linear_layers_in_one_graph_under_inductor() -> None:
    """What inductor may reuse spans both blocks, and micro-batches are in flight beside."""
    model = model_of("mixed", "fp32")
    right = run(*stage_of(model, None), SPLIT)
    stage, bucket = stage_of(model, None)
    two_in_one_graph(stage)
    assert_close(run(stage, bucket, SPLIT), right, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixed", "qwen", "neox", "bloom", "gemma"])
def test_every_gradient_under_inductor_in_fp64(name: str) -> None:
    assert_like_uncompiled(model_of(name), torch_compile, 1e-12)


KEPT: list[Tensor] = []


@torch.library.custom_op("megapipe_tests::kept_product", mutates_args=())
def kept_product(grad: Tensor, weight: Tensor) -> Tensor:
    KEPT.append(grad)
    return grad @ weight


@kept_product.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad @ weight


class KeptInside(Function):
    """A linear layer that keeps its gradient by an operation within the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight, rest[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return kept_product(grad, weight), None, None, torch.zeros_like(grad), None, None


def queue_kept(harvest: Any, _grads: Any) -> None:
    for layer, x in zip(reversed(harvest.layers), reversed(harvest.inputs), strict=True):
        layer.sharding.queue.put(LinearTask(layer, x, KEPT.pop(0)))


@pytest.mark.slow
def test_what_is_kept_inside_the_graph_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right as long as nothing reuses memory, and wrong under inductor."""
    monkeypatch.setattr(compiled, "_Product", KeptInside)
    monkeypatch.setattr(compiled._Harvest, "queue", queue_kept)
    model = model_of("mixed", "fp32")
    check(model, Traced())
    assert_like_uncompiled(model, Traced(), 1e-5)
    torch.compiler.reset()
    with pytest.raises(AssertionError, match=r"attention\.(qkv|out)\.weight after W0 is .* off"):
        assert_like_uncompiled(model, torch_compile, 1e-5)
    KEPT.clear()
    with pytest.raises(ConfigError, match=r"gradient 0 of out of a compiled block is .* off"):
        check(model, torch_compile)
