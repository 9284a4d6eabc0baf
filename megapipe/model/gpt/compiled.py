"""Blocks under torch.compile, with weight gradients still deferred to ``W``.

Inductor may overwrite a tensor that only the compiled graph holds, so the tensors that ``W`` needs
must leave the graph. A block is traced as a pure function with additional outputs: the inputs of
its linear layers. For each linear layer the function also takes a *sink*, an input that the forward
does not read. The sink's gradient is the gradient of the layer's output. An autograd function
outside the graph creates the sinks, gets their gradients after the compiled backward, and queues
the pairs for the uncompiled kernels (:mod:`megapipe.layers.weight_grad`). The graph computes the
gradients of norms, within ``I``.

In an MoE block the graph ends with the router's input. The MoE layer runs uncompiled, as the number
of rows per expert is not known beforehand.
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
    """Compiled graphs that all blocks of a stage share; the blocks have equal sizes.

    For each shape there are three kinds of calls: training, with `skip_output`, and without
    gradients. The first call of a kind compiles its graph. Dropout and slices need uncompiled
    blocks. Under context parallelism a call runs two graphs, one before and one after attention.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._run = compiler(run_block)
        self._until_mlp = compiler(run_until_mlp)
        self._before = compiler(before_attention)
        self._after = compiler(after_attention)
        self._between = compiler(from_attention_to_mlp)

    def __call__(
        self, block: Block, x: Tensor, mb: MicroBatch, rotary: Rotary, skip_output: bool
    ) -> Tensor:
        """Run `block`, [s(/tp), b, h] -> [s(/tp), b, h], without values if `skip_output`."""
        assert not (block.training and block.dropout), "a compiled block has no dropout"
        layers = [block.attention.qkv, block.attention.out]
        if block.mixture is None:
            layers += [block.mlp.up, block.mlp.down]
        sinks: Sequence[Tensor | None] = [None] * len(layers)
        harvest = _Harvest(layers)
        if torch.is_grad_enabled():
            sinks = _Sinks.apply(x.new_empty(0).requires_grad_(), harvest, x)
        else:
            x = x.detach()  # one graph, whether or not x requires a gradient
        linears = [_linear(layer, sink) for layer, sink in zip(layers, sinks, strict=True)]
        if block.sharding.kernels.context is not None:
            return self._around_attention(block, x, mb, rotary, linears, harvest, skip_output)
        length = layers[0].output_shape(x)[0]
        mask = None if mb.documents is None else mb.documents.mask(length)
        if block.mixture is None:
            y, harvest.inputs = self._run(block, x, rotary, mask, linears, skip_output)
            return y
        y, mlp_input, harvest.inputs = self._until_mlp(block, x, rotary, mask, linears)
        return y + block.run_moe(block.mixture, mlp_input, mb, skip_output)

    def _around_attention(
        self,
        block: Block,
        x: Tensor,
        mb: MicroBatch,
        rotary: Rotary,
        linears: Sequence[_Linear],
        harvest: _Harvest,
        skip_output: bool,
    ) -> Tensor:
        """Run a graph, then context-parallel attention uncompiled, then another graph."""
        context, attention = block.sharding.kernels.context, block.attention
        assert context is not None
        normed, q, k, v = self._before(block, x, rotary, linears[0])
        mixed = context.attend(q, k, v, mb, attention.scores, attention.layer).flatten(2)
        if block.mixture is None:
            y, inputs = self._after(block, x, mixed, linears[1:], skip_output)
            harvest.inputs = normed, *inputs
            return y
        y, mlp_input, of_out = self._between(block, x, mixed, linears[1])
        harvest.inputs = normed, of_out
        return y + block.run_moe(block.mixture, mlp_input, mb, skip_output)


class _Harvest:
    """Inputs and output gradients of one block's linear layers, for weight gradients."""

    def __init__(self, layers: Sequence[ParallelLinear]) -> None:
        self.layers = layers
        self.inputs: Sequence[Tensor] = ()

    def queue(self, grads: Sequence[Tensor]) -> None:
        """Defer the weight gradients to ``W``; `grads`: output gradients of the linear layers."""
        tasks = list(map(LinearTask, self.layers, self.inputs, grads))
        self.layers[0].sharding.queue.put(*reversed(tasks))


class _Sinks(Function):
    """Creates the sinks of a block's layers; its backward runs after the graph's backward."""

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
    """Weight, bias and sink of a linear layer, as arguments of a graph."""

    weight: Tensor
    """Weight [out, in]; the graph computes no gradient of weight or bias."""
    bias: Tensor | None
    sink: Tensor | None


def _linear(layer: ParallelLinear, sink: Tensor | None) -> _Linear:
    # .data: gathering the weights again between forward and backward does not count as a change
    bias = layer.vector()
    return _Linear(layer.matrix().data, None if bias is None else bias.data, sink)


class _Product(Function):
    """Product of a column- or row-parallel layer. The sink gets the gradient of the output.

    With `skip_output` the output has no value.
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
        skip_output: bool = False,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.sharding, ctx.column = sharding, column
        if skip_output:
            assert not column, "a segment can omit only the row-parallel layer at its end"
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
    """Replacement of :class:`Documents` that has only a mask [b, 1, s, s]."""

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
    skip_output: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a block: return its output [s(/tp), b, h] and the inputs of its linear layers."""
    normed, mixed = attended(block, x, rotary, mask, linears[0])
    y, inputs = after_attention(block, x, mixed, linears[1:], skip_output)
    return y, (normed, *inputs)


def run_until_mlp(
    block: Block, x: Tensor, rotary: Rotary, mask: Tensor | None, linears: Sequence[_Linear]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run a block up to its MoE layer. Return the residual, the router's input, and the inputs of
    the linear layers."""
    normed, mixed = attended(block, x, rotary, mask, linears[0])
    y, mlp_input, of_out = from_attention_to_mlp(block, x, mixed, linears[1])
    return y, mlp_input, (normed, of_out)


def attended(
    block: Block, x: Tensor, rotary: Rotary, mask: Tensor | None, qkv: _Linear
) -> tuple[Tensor, Tensor]:
    """Run norm, qkv and attention: return qkv's input and attention's output [s, b, h / tp]."""
    attention = block.attention
    documents = None if mask is None else cast(Documents, _Masked(mask))
    normed, q, k, v = before_attention(block, x, rotary, qkv)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    attend = block.sharding.kernels.attention
    return normed, merge_heads(attend(q, k, v, 0.0, documents, attention.scores))


def before_attention(
    block: Block, x: Tensor, rotary: Rotary, qkv: _Linear
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run norm and qkv. Return the input of qkv, queries [s, b, heads / tp, d], keys and values."""
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
    block: Block, x: Tensor, mixed: Tensor, linears: Sequence[_Linear], skip_output: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the rest of a block after attention; `mixed` is attention's output. Return the block's
    output and the inputs of its linear layers out, up and down."""
    sharding, mlp = block.sharding, block.mlp
    out, up, down = linears
    y, widened, of_out = from_attention_to_mlp(block, x, mixed, out)
    active = mlp.activate(_Product.apply(widened, *up, sharding, True))
    if block.mlp_post_norm is not None:
        y = y + block.mlp_post_norm(_Product.apply(active, *down, sharding, False))
    else:
        y = y + _Product.apply(active, *down, sharding, False, skip_output)
    return y, (of_out, widened.detach(), active.detach())


def from_attention_to_mlp(
    block: Block, x: Tensor, mixed: Tensor, out: _Linear
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block from attention's output (`mixed`, [s, b, h / tp]) to the MLP: return the
    residual, the MLP's input, and the input of the output projection."""
    z = _Product.apply(mixed, *out, block.sharding, False)
    if block.attention_post_norm is not None:
        z = block.attention_post_norm(z)
    y = x + z
    return y, block.mlp_norm(x if block.parallel else y), mixed.detach()
