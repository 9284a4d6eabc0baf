"""Routed experts: a layer that sends each token to some of many MLPs, with a split backward.

Each choice of a token is a row, and rows are in the order of experts
(:mod:`megapipe.layers.moe.permutation`), so an expert's rows are consecutive. The weight of a
choice multiplies the activation, not the expert's output, so the output need not be saved: the
weight's gradient is computed together with the activation's gradient.

From F to I the layer saves its input, the up-projection's outputs, the logits and the chosen
experts. Each rank routes its local positions. If experts are on several ranks, rows and weights are
dispatched to the experts' ranks, which save them too. Outputs in F and gradients in I are combined
on the tokens' ranks, in expert chunks if configured (:mod:`megapipe.layers.moe.dispatch`). ``W``
computes the weight gradients of both projections and of the router. It adds them straight into the
main gradients, expert by expert, and skips experts without rows. Frozen experts have no ``W``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from megapipe.experts.map import ExpertMap
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import routing as route
from megapipe.layers.moe.chunks import ExpertChunk
from megapipe.layers.moe.dispatch import Prefetch, joined
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.moe.padding import padded_counts
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.moe.routing import RoutingResult
from megapipe.layers.moe.routing_noise import TokenNoise
from megapipe.layers.moe.sharding import MoESharding, expert_parameter
from megapipe.layers.moe.slice_state import EARLIER, SliceRoutingState, added
from megapipe.layers.moe.specs import Routing
from megapipe.layers.moe.tasks import ExpertsTask, RouterTask
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.layers.moe.weights import ExpertGrads, ExpertWeights
from megapipe.layers.parameter import Sharding, new_parameter
from megapipe.layers.specs import ParameterSpec
from megapipe.ops.activation import Activate
from megapipe.ops.moe.grouped import each_expert


class RoutedExperts(nn.Module):
    """A router and its experts: [s(/tp), b, h] -> the same shape, for the s positions of a
    context-parallel rank. Each expert has two matrices, or three with a gate.

    `layer` is the index of the layer. With recomputation, the routing result of the first forward
    is stored with the micro-batch and reused by the forward that builds the graph.
    """

    def __init__(
        self,
        sharding: Sharding,
        layer: int,
        routing: Routing,
        activation: Activate,
        router: ParameterSpec,
        up: tuple[ParameterSpec, ParameterSpec | None],
        down: tuple[ParameterSpec, ParameterSpec | None],
    ) -> None:
        super().__init__()
        self.sharding = sharding = MoESharding.of(sharding)
        self.dispatcher = sharding.dispatcher
        self.layer = layer
        self.routing = routing
        self.activation = activation
        self.dtype = torch.promote_types(sharding.dtype, torch.float32)
        """Type of logits, scores and choices' weights, and of sums over choices."""
        self.first = sharding.part == 0
        """Whether this rank adds the down-projection bias; exactly one rank of an
        expert-tensor-parallel group does."""
        near = sharding.bandwidths
        self.distance: Tensor | None
        """[experts]: factor of each expert's load in the auxiliary loss, larger for experts on
        distant ranks; None: not used."""
        far = None if near is None else route.distance_factors(near, routing.experts, self.dtype)
        self.register_buffer("distance", far)
        self.frozen = router.frozen
        self.router = new_parameter(sharding, router)
        self.bias: Tensor | None
        """[experts]: selection biases, equal on all ranks; training adjusts them, without
        gradients."""
        bias = torch.zeros(routing.experts, dtype=self.dtype) if routing.has_expert_bias else None
        self.register_buffer("bias", bias)
        self.last: Tensor | None
        """[1, experts], int64: number of choices of each expert in the previous step, for an
        auxiliary loss over a whole step; uniform at first."""
        even = torch.ones(1, routing.experts, dtype=torch.int64)
        self.register_buffer("last", even if routing.scope == "step" else None)
        even_map = ExpertMap.even(routing.experts, sharding.ranks)
        self.ownership = ExpertOwners(even_map, sharding.rank)
        self.up, self.up_bias = self._linear(*up)
        self.down, self.down_bias = self._linear(*down)
        self.replicas: ExpertReplicas | None = None
        """Slots of experts and replicas; None if experts never move."""

    def _linear(
        self, weight: ParameterSpec, bias: ParameterSpec | None
    ) -> tuple[Parameter, Parameter | None]:
        made = None if bias is None else expert_parameter(self.sharding, bias, self.ownership)
        return expert_parameter(self.sharding, weight, self.ownership), made

    def forward(self, x: Tensor, mb: MicroBatch, skip_output: bool = False) -> Tensor:
        """Run the experts; with `skip_output` the output has a graph but no values."""
        return _ExpertsFunction.apply(
            x, self.router, self, mb, torch.is_grad_enabled(), skip_output
        )

    def noise(self, mb: MicroBatch, x: Tensor) -> TokenNoise | None:
        """Return the random numbers for tokens x [s, b, h], if routing uses any."""
        if not (self.training and (self.routing.jitter or self.routing.random_second)):
            return None
        return TokenNoise(
            mb, self.layer, (x.shape[0], x.shape[1]), self._shards(mb, x.shape[0], x.device)
        )

    def router_input(self, noise: TokenNoise | None, tokens: Tensor) -> Tensor:
        """Cast tokens to the type of the logits, and multiply them by the jitter. The backward maps
        the gradient of the router's input to the gradient of the tokens in the same way."""
        values = tokens.to(self.dtype)
        if noise is None or not self.routing.jitter:
            return values
        return values * noise.jitter(values, self.routing.jitter)

    def route(
        self,
        logits: Tensor,
        p: Tensor,
        mb: MicroBatch,
        sequences: int,
        graph: bool,
        noise: TokenNoise | None = None,
    ) -> RoutingResult:
        """Route the tokens of a micro-batch from the logits and the scores `p`; a recomputation
        gets the result of the first forward. `graph`: whether this forward builds the graph; then
        no recomputation follows. Collective over all ranks that share sequences or experts."""
        choices = mb.scratch.by_layer(route.CHOICE)
        found = choices.get(self.layer)
        if found is None:
            here = len(p) // sequences
            shards, earlier = self._shards(mb, here, p.device), self._earlier(mb)
            arguments = self.routing, sequences, shards
            second = noise.second(p.device) if noise and self.routing.random_second else None
            experts = route.route_tokens(p, *arguments, self.bias, second, earlier)
            rows = self._rows(self.to_slots(experts), sequences, shards)
            if not self.training:
                return RoutingResult(experts, experts.new_empty(0), rows)
            counts = route.count(experts, *arguments) if self.last is None else self.last
            spread = route.score_sums(p, self.routing, len(counts))
            if earlier is not None:
                earlier.score_sums = spread = added(earlier.score_sums, spread)
                if self.last is None:
                    earlier.counts = counts = added(earlier.counts, counts)
            found = RoutingResult(experts, counts, rows)
            complete_sums = spread if shards.ends(here) else None
            loads = mb.scratch.by_layer(route.LOAD)
            loads[self.layer] = route.routing_stats(
                logits, found, self.routing, complete_sums, self.distance
            )
            if not graph:
                choices[self.layer] = found
        elif graph:
            del choices[self.layer]
        return found

    def _rows(self, choice: Tensor, sequences: int, shards: TokenShards) -> ExpertCounts:
        """Return the number of rows per slot: counted in `choice`, or padded to the capacity."""
        dispatcher, num_slots = self.dispatcher, self._num_slots
        counting, here = dispatcher.counting, len(choice) // sequences
        if not dispatcher.pad:
            return dispatcher.count(choice, num_slots, counting)
        capacity = self.routing.expert_capacity(shards.length(here))
        assert capacity is not None, "checked"
        return padded_counts(num_slots, counting.size, sequences, min(capacity, here))

    def _shards(self, mb: MicroBatch, here: int, device: torch.device) -> TokenShards:
        return TokenShards.of(
            self.sharding.sequence,
            here,
            device,
            local_positions=mb.local_positions,
            start=mb.start,
            whole=mb.sequence_length,
        )

    def _earlier(self, mb: MicroBatch) -> SliceRoutingState | None:
        """Return the routing sums over a sequence's earlier slices, None for whole sequences."""
        if mb.sequence_scratch is None:
            return None
        return mb.sequence_scratch.by_layer(EARLIER).setdefault(self.layer, SliceRoutingState())

    @property
    def of_experts(self) -> list[Parameter]:
        """All parameters except the router's."""
        every = self.up, self.up_bias, self.down, self.down_bias
        return [each for each in every if each is not None]

    def to_slots(self, choice: Tensor) -> Tensor:
        """Replace expert ids by slot numbers."""
        return choice if self.replicas is None else self.replicas.to_slots(choice)

    @property
    def _num_slots(self) -> int:
        """Number of slots on all ranks that share the experts."""
        return self.routing.experts if self.replicas is None else self.replicas.num_slots

    @property
    def replicas_per_rank(self) -> int:
        """Number of replica slots on each rank."""
        return 0 if self.replicas is None else self.replicas.replicas_per_rank

    def weights(self, chunks: Sequence[ExpertChunk]) -> Prefetch[ExpertWeights]:
        """Return the transfer of the weights of the experts that this rank computes."""
        parameters = self.up, self.up_bias, self.down, self.down_bias
        return self.dispatcher.weights(parameters, chunks, self.replicas, adds_bias=self.first)

    def grads(self, chunks: Sequence[ExpertChunk]) -> ExpertGrads:
        """Return the accumulators for gradients of the experts that this rank computes."""
        return self.dispatcher.grads(chunks, self.replicas)

    def up_projection(self, of: ExpertWeights, ends: Sequence[int], x: Tensor) -> Tensor:
        """Compute the up-projection of an expert chunk's rows x: [rows, h] -> [rows, (2) f]."""
        wide = self.sharding.kernels.experts(x, of.up.flatten(1, -2).transpose(1, 2), ends)
        if of.up_bias is not None:
            for expert, here in each_expert(ends):
                wide[here] += of.up_bias[expert].flatten()
        return wide

    def down_projection(
        self, of: ExpertWeights, ends: Sequence[int], wide: Tensor, weight: Tensor
    ) -> Tensor:
        """Compute the down-projection of an expert chunk's rows: activation of `wide` [rows, (2)
        f], times the choices' weights [rows], times the matrix: [rows, h]."""
        inner = self.sharding.kernels.moe_elementwise.activate_and_weight(
            wide, weight, self.activation
        )
        y = self.sharding.kernels.experts(inner, of.down.transpose(1, 2), ends)
        if of.down_bias is not None:
            for expert, here in each_expert(ends):
                y[here] += weight[here].unsqueeze(1).to(y.dtype) * of.down_bias[expert]
        return y

    def input_grads(
        self, of: ExpertWeights, ends: Sequence[int], grad: Tensor, wide: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the backward of an expert chunk's rows from their output gradient [rows, h] and
        the up-projection's output `wide`. Return the down-projection's input [rows, f], and the
        gradients of `wide` [rows, (2) f] and of the weights [rows]."""
        kernels = self.sharding.kernels
        product = partial(kernels.experts, grad, of.down, ends)
        inner, grad_wide, of_weight = kernels.moe_elementwise.gradients(
            wide, weight, product, self.activation
        )
        if of.down_bias is not None:
            for expert, own in each_expert(ends):
                of_weight[own] += (grad[own] @ of.down_bias[expert]).to(self.dtype)
        return inner, grad_wide, of_weight


def expert_layers(module: Any) -> Iterator[RoutedExperts]:
    """Yield the routed experts of a stage's MoE layers."""
    return (each for each in module.modules() if isinstance(each, RoutedExperts))


class _ExpertsFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        router: Parameter,
        layer: RoutedExperts,
        mb: MicroBatch,
        graph: bool,
        skip_output: bool,
    ) -> Tensor:
        routing, tokens, sequences = layer.routing, x.flatten(0, 1), x.shape[1]
        noise = layer.noise(mb, x)
        logits = layer.router_input(noise, tokens) @ router.to(layer.dtype).t()
        p = routing.router.scores(logits)
        choice, counts, row_counts = layer.route(logits, p, mb, sequences, graph, noise)
        kernels = layer.sharding.kernels
        weights = route.routing_weights(p, route.decode_choices(choice), routing)
        slots = layer.to_slots(choice), row_counts, layer.replicas_per_rank
        dispatch = layer.dispatcher.dispatch(*slots)  # the host waits for the counts
        del slots
        combine, matrices = dispatch.combine(), layer.weights(dispatch.plan.chunks)
        both = dispatch.dispatch_tokens(tokens), dispatch.dispatch_weights(weights)
        arrived: list[list[Tensor]] = []
        widened: list[Tensor] = []
        for chunk, of, values in dispatch.pipelined_chunks(matrices, *both):
            arrived.append(values)
            here, weight = values
            widened.append(layer.up_projection(of, chunk.ends, here))
            if not skip_output:
                combine.send(layer.down_projection(of, chunk.ends, widened[-1], weight))
            del of  # free fetched matrices before fetching more
        kept: Iterable[Tensor | None] = None, None
        if not dispatch.plan.alone:
            kept = map(joined, zip(*arrived, strict=True))
        rows_kept, weights_kept = kept
        needed = (None, None) if layer.frozen else (x, rows_kept)
        if mb.sequence_scratch is not None:
            counts = counts.data  # own version counter: later slices add to it
        ctx.save_for_backward(
            *needed, weights_kept, joined(widened), logits, choice, counts, *dispatch.tensors
        )
        ctx.plan, ctx.layer, ctx.unit = dispatch.plan, layer, mb.position_scale
        ctx.seen = partial(layer.router_input, noise)
        if skip_output:
            return x.new_empty(()).expand(x.shape)
        total = dispatch.rows.unpermute(combine.wait(), layer.dtype, kernels.moe_elementwise)
        return total.to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, here, weight, wide, logits, choice, counts, *tensors = ctx.saved_tensors
        layer: RoutedExperts = ctx.layer
        dispatch = layer.dispatcher.restore(ctx.plan, *tensors)
        rows, plan = dispatch.rows, dispatch.plan
        queue, kernels = layer.sharding.queue, layer.sharding.kernels
        routing, ids = layer.routing, route.decode_choices(choice)
        p = routing.router.scores(logits)
        if weight is None:
            weight = rows.permute_weights(route.routing_weights(p, ids, routing))
        of_x, of_weights = dispatch.combine(), dispatch.combine_weight_grads()
        found: list[tuple[Tensor, ...]] = []
        matrices = layer.weights(plan.chunks)
        grads = dispatch.dispatch_tokens(grad.flatten(0, 1))
        for chunk, of, (grad_y,) in dispatch.pipelined_chunks(matrices, grads):
            part, ends = chunk.expert_rows, chunk.ends
            inner, grad_wide, of_weight = layer.input_grads(
                of, ends, grad_y, wide[part], weight[part]
            )
            if not layer.frozen:
                found.append((grad_y, inner, grad_wide))
            of_x.send(kernels.experts(grad_wide, of.up.flatten(1, -2), ends))
            of_weights.send(of_weight)
            del of
        if not layer.frozen:
            tokens = x.detach().flatten(0, 1)
            grad_y, inner, grad_wide = map(joined, zip(*found, strict=True))
            how = plan.ends, kernels.accumulate, layer.grads(plan.chunks)
            down = layer.down, layer.down_bias, inner, grad_y, *how
            queue.put(ExpertsTask(*down, weighted=weight))
            here = rows.permute(tokens) if here is None else here
            queue.put(ExpertsTask(layer.up, layer.up_bias, here, grad_wide, *how))
        grad_x = of_x.wait()
        of_logits = route.logits_grad(
            rows.unpermute_weights(of_weights.wait()),
            *(logits, p, ids, counts, routing, ctx.unit, layer.distance),
        )
        if not layer.frozen:
            queue.put(RouterTask(layer.router, tokens, of_logits, ctx.seen))
        total = rows.unpermute(grad_x, layer.dtype, kernels.moe_elementwise)
        total += ctx.seen(of_logits @ layer.router.to(layer.dtype))
        return total.to(grad.dtype).view_as(grad), None, None, None, None, None
