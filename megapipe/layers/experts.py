"""Experts: a layer that sends each token to some of many MLPs, with a split backward.

Rows are tokens in the order of their experts, each as often as it has chosen
(:mod:`megapipe.layers.expert_rows`); the products of an expert take the rows between two ends. The
weight of a choice multiplies the activation and not the expert's output, which therefore need not
be kept: its gradient is found beside the activation's.

From F to I the layer keeps its input, the outputs of the first product, the logits and the choice.
Each rank routes the positions that it has. Where experts are on several ranks, rows and weights go
to those of their experts, which keep them too; outputs, and in I gradients, come back likewise.
``W`` gets two grouped products and the router's; they add straight into the main gradients, expert
by expert, and leave an expert without rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from megapipe.layers import routing as route
from megapipe.layers.expert_rows import Dispatch, Rows, count_rows
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe_specs import Routing
from megapipe.layers.parameter import Sharding, new_parameter
from megapipe.layers.routing import Chosen
from megapipe.layers.routing_noise import TokenNoise
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.token_shards import TokenShards
from megapipe.layers.weight_grad import add_product, main_grad
from megapipe.ops.grouped import each_expert
from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate

Activation = Callable[[Tensor], Tensor]
"""The output of the first product -> the input of the second."""


class ExpertsTask:
    """Weight and bias gradients of one linear layer of all experts here, from rows of its input and
    of its output's gradient; `weight` [rows] multiplies the bias."""

    __slots__ = ("_accumulate", "_bias", "_ends", "grad", "weight", "weighted", "x")

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        x: Tensor,
        grad: Tensor,
        ends: Sequence[int],
        accumulate: AccumulateKernel,
        weighted: Tensor | None = None,
    ) -> None:
        self.weight, self._bias = weight, bias
        self.x, self.grad, self._ends = x, grad, ends
        self._accumulate = accumulate
        self.weighted = weighted

    def begin(self) -> None:
        """Nothing is gathered."""

    def run(self) -> None:
        weight = main_grad(self.weight).flatten(1, -2)  # [experts, out, in]
        for expert, rows in each_expert(self._ends):
            self._accumulate(weight[expert], self.grad[rows], self.x[rows])
        if self._bias is None:
            return
        bias = main_grad(self._bias).flatten(1)
        for expert, rows in each_expert(self._ends):
            grad = self.grad[rows].to(bias.dtype)
            if self.weighted is None:
                bias[expert] += grad.sum(0)
            else:
                bias[expert].addmv_(grad.t(), self.weighted[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.grad, *(() if self.weighted is None else (self.weighted,)))


class RouterTask:
    """Weight gradient of a router, in the type of its logits; `seen` is what it makes of x."""

    __slots__ = ("_seen", "grad", "weight", "x")

    def __init__(
        self, weight: Parameter, x: Tensor, grad: Tensor, seen: Callable[[Tensor], Tensor]
    ) -> None:
        self.weight, self.x, self.grad = weight, x, grad
        self._seen = seen

    def begin(self) -> None:
        """Nothing is gathered."""

    def run(self) -> None:
        add_product(self.weight, self.grad, self._seen(self.x), torch_accumulate)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.grad


class Experts(nn.Module):
    """[s(/tp), b, h] -> the same shape: a router and its experts, each of two matrices (with a gate
    three). s are the positions of a context-parallel rank.

    `layer` is the number of the layer. The choice of a first run is kept with the micro-batch until
    the run that builds the graph has taken it.
    """

    def __init__(
        self,
        sharding: Sharding,
        layer: int,
        routing: Routing,
        activation: Activation,
        router: ParameterSpec,
        up: tuple[ParameterSpec, ParameterSpec | None],
        down: tuple[ParameterSpec, ParameterSpec | None],
    ) -> None:
        super().__init__()
        self.sharding = sharding
        self.layer = layer
        self.routing = routing
        self.activation = activation
        self.dtype = torch.promote_types(sharding.dtype, torch.float32)
        """Of logits, scores and weights, and of sums over choices."""
        self.first = sharding.ep.index % sharding.etp == 0
        """Of the ranks with parts of the same experts, whose results are added up, this one adds
        the bias of the second product."""
        self.router = new_parameter(sharding, router)
        self.bias: Tensor | None
        """[experts], of all of them, the same on every rank; what trains the model moves it."""
        bias = torch.zeros(routing.experts, dtype=self.dtype) if routing.biased else None
        self.register_buffer("bias", bias)
        self.last: Tensor | None
        """[1, experts], int64: the choices of each in the last step; spread evenly at first."""
        even = torch.ones(1, routing.experts, dtype=torch.int64)
        self.register_buffer("last", even if routing.scope == "step" else None)
        self.up, self.up_bias = self._linear(*up)
        self.down, self.down_bias = self._linear(*down)

    def _linear(
        self, weight: ParameterSpec, bias: ParameterSpec | None
    ) -> tuple[Parameter, Parameter | None]:
        made = None if bias is None else new_parameter(self.sharding, bias)
        return new_parameter(self.sharding, weight), made

    def forward(self, x: Tensor, mb: MicroBatch, graph_only: bool = False) -> Tensor:
        """With `graph_only` the output has a graph but no values."""
        return _ExpertsFunction.apply(x, self.router, self, mb, torch.is_grad_enabled(), graph_only)

    def noise(self, mb: MicroBatch, x: Tensor) -> TokenNoise | None:
        """The random numbers of the tokens x [s, b, h], where there are some."""
        if not (self.training and (self.routing.jitter or self.routing.random_second)):
            return None
        return TokenNoise(mb, self.layer, (x.shape[0], x.shape[1]), self._shards(mb, x.device))

    def seen(self, noise: TokenNoise | None, tokens: Tensor) -> Tensor:
        """Tokens as the router sees them, or from the gradient of that their own: in the type of
        its logits, times the jitter."""
        values = tokens.to(self.dtype)
        if noise is None or not self.routing.jitter:
            return values
        return values * noise.jitter(values, self.routing.jitter)

    def choice(
        self,
        logits: Tensor,
        p: Tensor,
        mb: MicroBatch,
        sequences: int,
        graph: bool,
        noise: TokenNoise | None = None,
    ) -> Chosen:
        """The choice for a micro-batch: that of its first run, if there was one; `graph`: this run
        builds the graph, and is the last. All ranks that share sequences or experts call it."""
        found = mb.choices.get(self.layer)
        if found is None:
            given = self.routing, sequences, self._shards(mb, p.device)
            second = noise.second(p.device) if noise and self.routing.random_second else None
            experts = route.choose(p, *given, self.bias, second)
            rows = count_rows(experts, self.routing.experts, self.sharding.ep)
            if not self.training:
                return Chosen(experts, experts.new_empty(0), rows)
            counts = route.count(experts, *given) if self.last is None else self.last
            found = Chosen(experts, counts, rows)
            mb.loads[self.layer] = route.load(logits, p, found, self.routing)
            if not graph:
                mb.choices[self.layer] = found
        elif graph:
            del mb.choices[self.layer]
        return found

    def _shards(self, mb: MicroBatch, device: torch.device) -> TokenShards:
        return TokenShards.of(self.sharding.sequence, mb.held, device)

    def widen(self, x: Tensor, ends: Sequence[int]) -> Tensor:
        """The first product of rows [rows, h]: [rows, (2) f]."""
        wide = self.sharding.kernels.experts(x, self.up.flatten(1, -2).transpose(1, 2), ends)
        if self.up_bias is not None:
            for expert, here in each_expert(ends):
                wide[here] += self.up_bias[expert].flatten()
        return wide

    def narrow(self, inner: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
        """The second product of weighted activations [rows, f]: [rows, h]."""
        y = self.sharding.kernels.experts(inner, self.down.transpose(1, 2), ends)
        if self.down_bias is not None and self.first:
            for expert, here in each_expert(ends):
                y[here] += weight[here].unsqueeze(1).to(y.dtype) * self.down_bias[expert]
        return y


class _ExpertsFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        router: Parameter,
        layer: Experts,
        mb: MicroBatch,
        graph: bool,
        graph_only: bool,
    ) -> Tensor:
        routing, tokens, sequences = layer.routing, x.flatten(0, 1), x.shape[1]
        noise = layer.noise(mb, x)
        logits = layer.seen(noise, tokens) @ router.to(layer.dtype).t()
        p = route.scores(logits, routing)
        choice, counts, told = layer.choice(logits, p, mb, sequences, graph, noise)
        ep = layer.sharding.ep
        rows = Rows.of(choice, sum(told.of_ranks[ep.index]))
        dispatch = Dispatch.of(told, ep, layer.sharding.etp)
        weights = route.weights(p, route.experts_of(choice), routing)
        here, weight = dispatch.there(rows.gather(tokens)), dispatch.there(rows.of_choices(weights))
        wide = layer.widen(here, dispatch.ends)
        kept = (None, None) if dispatch.order is None else (here, weight)
        ctx.save_for_backward(
            x, wide, logits, choice, counts, rows.order, rows.slots, dispatch.order, *kept
        )
        ctx.total, ctx.dispatch = rows.total, dispatch._replace(order=None)
        ctx.layer, ctx.unit, ctx.seen = layer, mb.position_scale, partial(layer.seen, noise)
        if graph_only:
            return x.new_empty(()).expand(x.shape)
        inner = (layer.activation(wide) * weight.unsqueeze(1)).to(x.dtype)
        y = dispatch.back(layer.narrow(inner, weight, dispatch.ends))
        return rows.add_up(y, layer.dtype).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, wide, logits, choice, counts, order, slots, arrival, here, weight = ctx.saved_tensors
        layer: Experts = ctx.layer
        rows, tokens = Rows(order, slots, ctx.total), x.detach().flatten(0, 1)
        dispatch: Dispatch = ctx.dispatch._replace(order=arrival)
        ends = dispatch.ends
        queue, kernels = layer.sharding.queue, layer.sharding.kernels
        accumulate = kernels.accumulate
        routing, ids = layer.routing, route.experts_of(choice)
        p = route.scores(logits, routing)
        if weight is None:
            weight = rows.of_choices(route.weights(p, ids, routing))
        grad_y = dispatch.there(rows.gather(grad.flatten(0, 1)))

        with torch.enable_grad():
            wide = wide.detach().requires_grad_()
            plain = layer.activation(wide)  # [rows, f]
        inner = (plain.detach() * weight.unsqueeze(1)).to(x.dtype)
        grad_inner = kernels.experts(grad_y, layer.down, ends)
        of_weight = (grad_inner * plain.detach()).sum(-1, dtype=layer.dtype)
        if layer.down_bias is not None and layer.first:
            for expert, own in each_expert(ends):
                of_weight[own] += (grad_y[own] @ layer.down_bias[expert]).to(layer.dtype)
        queue.put(ExpertsTask(layer.down, layer.down_bias, inner, grad_y, ends, accumulate, weight))
        grad_plain = (grad_inner * weight.unsqueeze(1)).to(x.dtype)
        (grad_wide,) = torch.autograd.grad(plain, wide, grad_plain)

        grad_x = kernels.experts(grad_wide, layer.up.flatten(1, -2), ends)
        here = rows.gather(tokens) if here is None else here
        queue.put(ExpertsTask(layer.up, layer.up_bias, here, grad_wide, ends, accumulate))
        grad_x = dispatch.back(grad_x)
        of_logits = route.logits_grad(
            rows.to_choices(dispatch.back(of_weight)), logits, p, ids, counts, routing, ctx.unit
        )
        queue.put(RouterTask(layer.router, tokens, of_logits, ctx.seen))
        total = rows.add_up(grad_x, layer.dtype)
        total += ctx.seen(of_logits @ layer.router.to(layer.dtype))
        return total.to(x.dtype).view_as(x), None, None, None, None, None
