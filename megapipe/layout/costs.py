"""Costs of each stage's operations, from the matrix products that they compute.

These are the costs by which layers are shared out (:func:`~megapipe.model.partition.balanced`),
orders are made for stages that differ, and the plan is drawn and timed. They count what a run
computes, so also the padding of the vocabulary and what is run again in a backward; the share of
the model's own FLOPs in them is :mod:`megapipe.model.gpt.flops`.

A linear layer takes as many in F as in I and in W. The products of attention have no weights: F
once, I twice. A loss in chunks has all three products of the head in I
(:mod:`megapipe.layers.linear_cross_entropy`). Looking up an embedding is none.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from megapipe.config import Config
from megapipe.layers.policy import Span, padded_vocabulary
from megapipe.layout.activations import stage_spans
from megapipe.layout.devices import device_kind
from megapipe.layout.slices import slice_shares
from megapipe.model.gpt.flops import layer_flops
from megapipe.model.gpt.parameters import known
from megapipe.model.partition import StageSpec, balanced, parse_layout
from megapipe.schedule.cost import Cost, PerStage
from megapipe.schedule.placement import Placement


class Work(NamedTuple):
    """FLOPs per token of one stage, on all tensor-parallel ranks together."""

    F: int
    I: int  # noqa: E741
    W: int
    R: int
    """Running it again, if it is run again as a whole."""


class Parts(NamedTuple):
    """FLOPs per token, forward and backward, of what a stage is made of."""

    layer: Fraction
    embedding: Fraction
    head: Fraction


def part_costs(config: Config) -> Parts:
    """Costs that a layer, the embedding and the head add to a stage.

    With them what a policy has run again, if it is the same for all layers; otherwise the stages
    are not known yet to which it applies, and nothing is.
    """
    once, activations = _Once.of(config), config.activations
    layer, head = Fraction(3 * once.layer), Fraction(3 * once.head)
    policy = activations.policy
    if activations.blocks is None and isinstance(policy, str):
        if policy == "full":
            layer += once.layer - Fraction(once.last, activations.unit)
        elif policy == "selective" and "attention" in activations.modules:
            layer += once.scores
        elif policy == "stage":
            layer += once.layer
            head += once.last + once.head
    return Parts(layer, Fraction(0), head)


def stage_work(
    config: Config,
    stages: Sequence[StageSpec],
    spans: Sequence[Sequence[Span]],
    again: Collection[int],
    *,
    chunked: bool,
) -> tuple[Work, ...]:
    """FLOPs of each stage. The blocks' policies are `spans`; the stages `again` are run again as a
    whole, which is not in their I but in R. `chunked`: the loss is computed in chunks."""
    once = _Once.of(config)
    result = []
    for stage, (spec, policies) in enumerate(zip(stages, spans, strict=True)):
        layers, is_again = len(spec.layers), stage in again
        repeated = 0
        for blocks, policy in policies:
            if "block" in policy.recompute:
                repeated += blocks * once.layer - once.last
            elif "attention" in policy.recompute:
                repeated += blocks * once.scores
        head = once.head if spec.head else 0
        left_out = once.last if layers and not spec.head else 0
        result.append(
            Work(
                # a forward without a graph computes the loss, in chunks or not
                F=layers * once.layer + (head if is_again or not chunked else 0),
                I=layers * (once.layer + once.scores) + repeated + (3 * head if chunked else head),
                W=layers * (once.layer - once.scores) + (0 if chunked else head),
                R=is_again * (layers * once.layer - left_out + (0 if chunked else head)),
            )
        )
    return tuple(result)


def relative_cost(config: Config, work: Sequence[Work], slice_lengths: Sequence[int]) -> Cost:
    """The costs of stages in FLOPs per token; messages and replicas take no time."""
    F, I, W, R = zip(*work, strict=True)  # noqa: E741
    sliced = len(slice_lengths) > 1
    shares = slice_shares(config.model, slice_lengths) if sliced else None
    return Cost(F=F, I=I, W=W, R=R, slices=shares)


def scaled(cost: Cost, factor: float) -> Cost:
    """The same costs of operations in another unit, of which one of the old ones is `factor`."""

    def times(row: PerStage | None) -> tuple[float, ...]:
        assert isinstance(row, tuple)
        return tuple(float(time) * factor for time in row)

    return replace(cost, F=times(cost.F), I=times(cost.I), W=times(cost.W), R=times(cost.R))


def placement_cost(config: Config, placement: Placement) -> Cost:
    """The costs of a resolved model's stages on a placement, its layers shared out for it; 1 is
    the forward of a layer."""
    layers, parts = config.model.layers, part_costs(config)
    stages = parse_layout(balanced(layers, placement, *parts), layers)
    every = range(len(stages))
    spans = stage_spans(config.activations, stages)
    chunked = config.kernels.loss_tokens(cuda=device_kind(config) == "cuda") > 0
    kept = stage_work(config, stages, spans, (), chunked=chunked)
    repeated = stage_spans(config.activations, stages, every)
    again = stage_work(config, stages, repeated, every, chunked=chunked)
    work = [own._replace(R=other.R) for own, other in zip(kept, again, strict=True)]
    return scaled(relative_cost(config, work, ()), 1 / _Once.of(config).layer)


class _Once(NamedTuple):
    """FLOPs per token of one forward."""

    layer: int
    scores: int
    """Of those, what attention computes between the projections."""
    last: int
    """Of those, the last product, which is left out where a layer is run again."""
    head: int
    """As a layer, where the vocabulary is not known yet."""

    @classmethod
    def of(cls, config: Config) -> "_Once":
        model = config.model
        layer = layer_flops(model, config.train.sequence_length)
        head = layer
        if model.vocab_size is not None:
            head = 2 * model.hidden * padded_vocabulary(model.vocab_size, config.parallel.tp)
        return cls(
            layer=layer,
            scores=layer - layer_flops(model, 0),
            last=2 * model.hidden * known(model.ffn_hidden),
            head=head,
        )
