"""Blocks under torch.compile, whose weight gradients still wait for ``W``.

Inductor may write over a tensor that a compiled graph keeps to itself, so all that is queued has to
leave the graph. A block is traced as a pure function. The inputs of its linear layers are further
outputs of the forward. Each layer has a *sink*, an input that the forward does not read, whose
gradient is that of the layer's output. Outside the graph an autograd function gives out the sinks,
is given their gradients when the compiled backward is done, and queues the pairs for the kernels
that run without compilation too (:mod:`megapipe.layers.weight_grad`). The gradients of norms are
computed by the graph, within ``I``.

A block that routes its tokens runs uncompiled from there on, behind a graph that ends with the
input of its router: how many go where is known to nobody before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.layers.linear import (
    LinearTask,
    ParallelLinear,
    column_input_grad,
    column_product,
    row_input_grad,
    row_product,
)
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.model.gpt.attention import merge_heads
from megapipe.model.gpt.block import Block, Rotary
from megapipe.ops.compiler import Compiler
from megapipe.ops.documents import Documents
from megapipe.ops.rotary import rotated


class CompiledBlock:
    """Runs the blocks of a stage, which have the same sizes, by shared graphs.

    The first call of a kind compiles its graph: there is one for each shape, in training, with
    `graph_only`, and without gradients. Dropout and slices are for uncompiled blocks. Where
    positions are split over ranks there are two graphs, one before attention and one after it.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._run = compiler(run_block)
        self._until_mlp = compiler(run_until_mlp)
        self._before = compiler(before_attention)
        self._after = compiler(after_attention)
        self._between = compiler(from_attention_to_mlp)

    def __call__(
        self, block: Block, x: Tensor, mb: MicroBatch, rotary: Rotary, graph_only: bool
    ) -> Tensor:
        """[s(/tp), b, h] -> [s(/tp), b, h]; with `graph_only` the output has no value."""
        assert not (block.training and block.dropout), "a compiled block has no dropout"
        layers = [block.attention.qkv, block.attention.out]
        if block.mixture is None:
            layers += [block.mlp.up, block.mlp.down]
        sinks: Sequence[Tensor | None] = [None] * len(layers)
        harvest = _Harvest(layers)
        if torch.is_grad_enabled():
            sinks = _Sinks.apply(x.new_empty(0).requires_grad_(), harvest, x)
        else:
            x = x.detach()  # one graph, whatever x could be differentiated for
        linears = [_linear(layer, sink) for layer, sink in zip(layers, sinks, strict=True)]
        if block.sharding.kernels.context is not None:
            return self._around_attention(block, x, mb, rotary, linears, harvest, graph_only)
        length = layers[0].output_shape(x)[0]
        mask = None if mb.documents is None else mb.documents.mask(length)
        if block.mixture is None:
            y, harvest.inputs = self._run(block, x, rotary, mask, linears, graph_only)
            return y
        y, given, harvest.inputs = self._until_mlp(block, x, rotary, mask, linears)
        return y + block.run_moe(block.mixture, given, mb, graph_only)

    def _around_attention(
        self,
        block: Block,
        x: Tensor,
        mb: MicroBatch,
        rotary: Rotary,
        linears: Sequence[_Linear],
        harvest: _Harvest,
        graph_only: bool,
    ) -> Tensor:
        """By two graphs, with attention between them, whose ranks send each other messages."""
        context, attention = block.sharding.kernels.context, block.attention
        assert context is not None
        normed, q, k, v = self._before(block, x, rotary, linears[0])
        mixed = context.attend(q, k, v, mb, attention.scores, attention.layer).flatten(2)
        if block.mixture is None:
            y, inputs = self._after(block, x, mixed, linears[1:], graph_only)
            harvest.inputs = normed, *inputs
            return y
        y, given, of_out = self._between(block, x, mixed, linears[1])
        harvest.inputs = normed, of_out
        return y + block.run_moe(block.mixture, given, mb, graph_only)


class _Harvest:
    """Inputs and gradients that the weight gradients of one block and micro-batch need."""

    def __init__(self, layers: Sequence[ParallelLinear]) -> None:
        self.layers = layers
        self.inputs: Sequence[Tensor] = ()

    def queue(self, grads: Sequence[Tensor]) -> None:
        """Leave the weight gradients to ``W``, in the order of the backward."""
        tasks = list(map(LinearTask, self.layers, self.inputs, grads))
        self.layers[0].sharding.queue.put(*reversed(tasks))


class _Sinks(Function):
    """Gives out the sinks of a block's layers; its backward runs after that of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, harvest: _Harvest, x: Tensor) -> tuple[Tensor, ...]:
        ctx.harvest = harvest
        shapes = [
            layer.output_shape(x) if layer.splits_outputs else x.shape for layer in harvest.layers
        ]
        return tuple(x.new_zeros(()).expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.harvest.queue(grads)
        return None, None, None


class _Linear(NamedTuple):
    """A linear layer as the graph sees it."""

    weight: Tensor
    """[out, in]; the graph has no gradient for it, nor for the bias."""
    bias: Tensor | None
    sink: Tensor | None


def _linear(layer: ParallelLinear, sink: Tensor | None) -> _Linear:
    # data: weights that are gathered again between forward and backward are no change of values
    bias = layer.vector()
    return _Linear(layer.matrix().data, None if bias is None else bias.data, sink)


class _Product(Function):
    """A column- or row-parallel layer, whose sink gets the gradient of the output.

    With `graph_only` the output has no value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        sharding: Sharding,
        column: bool,
        graph_only: bool = False,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.sharding, ctx.column = sharding, column
        if graph_only:
            assert not column, "it is the row-parallel layer at its end that a segment leaves out"
            split = sharding.tp.size if sharding.sequence_split else 1
            return x.new_zeros(x.shape[0] // split, *x.shape[1:-1], len(weight))
        product = column_product if column else row_product
        return product(x, weight, bias, sharding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        input_grad = column_input_grad if ctx.column else row_input_grad
        return input_grad(grad, weight, ctx.sharding), None, None, grad, None, None, None


class _Masked:
    """Documents of which only the mask [b, 1, s, s] is known."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def mask(self, s: int) -> Tensor:
        return self._mask


def run_block(
    block: Block,
    x: Tensor,
    rotary: Rotary,
    mask: Tensor | None,
    linears: Sequence[_Linear],
    graph_only: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The function that is compiled: the output [s(/tp), b, h], and the linear layers' inputs."""
    normed, mixed = attended(block, x, rotary, mask, linears[0])
    y, inputs = after_attention(block, x, mixed, linears[1:], graph_only)
    return y, (normed, *inputs)


def run_until_mlp(
    block: Block, x: Tensor, rotary: Rotary, mask: Tensor | None, linears: Sequence[_Linear]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """For a block that routes: what is added to, the router's input, those of linear layers."""
    normed, mixed = attended(block, x, rotary, mask, linears[0])
    y, given, of_out = from_attention_to_mlp(block, x, mixed, linears[1])
    return y, given, (normed, of_out)


def attended(
    block: Block, x: Tensor, rotary: Rotary, mask: Tensor | None, qkv: _Linear
) -> tuple[Tensor, Tensor]:
    """The linear layer's input, and attention's output [s, b, h / tp]."""
    attention = block.attention
    documents = None if mask is None else cast(Documents, _Masked(mask))
    normed, q, k, v = before_attention(block, x, rotary, qkv)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    attend = block.sharding.kernels.attention
    return normed, merge_heads(attend(q, k, v, 0.0, documents, attention.scores))


def before_attention(
    block: Block, x: Tensor, rotary: Rotary, qkv: _Linear
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The linear layer's input, queries [s, b, heads / tp, d], keys and values."""
    attention = block.attention
    normed = block.attention_norm(x)
    q, k, v = attention.heads(_Product.apply(normed, *qkv, block.sharding, True))
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if rotary is not None:
        cos, sin = (table.squeeze(2) for table in rotary)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return normed.detach(), q, k, v


def after_attention(
    block: Block, x: Tensor, mixed: Tensor, linears: Sequence[_Linear], graph_only: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """From attention's output [s, b, h / tp] to the block's, and the inputs of linear layers."""
    sharding, mlp = block.sharding, block.mlp
    out, up, down = linears
    y, widened, of_out = from_attention_to_mlp(block, x, mixed, out)
    active = mlp.activate(_Product.apply(widened, *up, sharding, True))
    if block.mlp_post_norm is not None:
        y = y + block.mlp_post_norm(_Product.apply(active, *down, sharding, False))
    else:
        y = y + _Product.apply(active, *down, sharding, False, graph_only)
    return y, (of_out, widened.detach(), active.detach())


def from_attention_to_mlp(
    block: Block, x: Tensor, mixed: Tensor, out: _Linear
) -> tuple[Tensor, Tensor, Tensor]:
    """From attention's output [s, b, h / tp] to what the MLP adds to, and its input; and the linear
    layer's input."""
    z = _Product.apply(mixed, *out, block.sharding, False)
    if block.attention_post_norm is not None:
        z = block.attention_post_norm(z)
    y = x + z
    return y, block.mlp_norm(x if block.parallel else y), mixed.detach()
