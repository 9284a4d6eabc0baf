"""FLOPs of the operations of a GPT's stages, from the matrix products that they compute.

They count what a run computes, so also the padding of the vocabulary, empty rows of experts and
what is run again in a backward; the share of the model's own FLOPs in them is
:mod:`megapipe.model.gpt.flops`.

A linear layer takes as many in F as in I and in W. The products of attention have no weights: F
once, I twice. A loss in chunks has all three products of the head in I
(:mod:`megapipe.layers.linear_cross_entropy`). Looking up an embedding takes no FLOPs.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.layers.policy import BlockPolicy, BlockSpan, padded_vocabulary
from megapipe.model.gpt.flops import layer_flops, row_flops
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import UniformRecompute, Work
from megapipe.model.partition import StageSpec

Exact = int | Fraction


class Once(NamedTuple):
    """FLOPs per token of one forward."""

    layer: Exact
    scores: int
    """The part of `layer` that attention computes between its projections."""
    experts: Exact
    """FLOPs of experts that are run again by themselves: router and first product."""
    last: Exact
    """The part of `layer` of its last product, which recomputation of the layer leaves out; 0 if it
    does not."""
    head: Exact
    """Taken as those of a layer where the vocabulary is not known yet."""

    @classmethod
    def of(cls, model: ModelConfig, length: int, tp: int, number: int, *, rows: Exact) -> "Once":
        """Of a resolved model's layer of this number, at sequences of `length` tokens, for each of
        which experts have so many `rows`, if there are some."""
        experts = model.moe.experts_of(number)
        linear = layer_flops(model, 0, experts=experts)
        layer = layer_flops(model, length, model.window_of(number), experts=experts)
        empty = row_flops(model) * (rows - model.moe.top_k) if experts else 0
        whole: Exact = layer + empty
        head = whole
        if model.vocab_size is not None:
            head = 2 * model.hidden * padded_vocabulary(model.vocab_size, tp)
        return cls(
            layer=whole,
            scores=layer - linear,
            experts=_first_products(model, experts, rows),
            last=0 if model.post_norms else 2 * model.hidden * _last_width(model, experts, rows),
            head=head,
        )


def _last_width(model: ModelConfig, experts: int, rows: Exact) -> Exact:
    """Inputs of a layer's last product; of a token's experts and the MLP beside them together."""
    moe = model.moe
    if not experts:
        return known(model.ffn_hidden)
    if moe.shared_gate != "none":  # which multiplies the output
        return 0
    return rows * known(moe.ffn) + (moe.shared or 0)


def _first_products(model: ModelConfig, experts: int, rows: Exact) -> Exact:
    """FLOPs per token of the router of so many experts, and of their first product."""
    wide = rows * known(model.moe.ffn) * (2 if model.gated else 1) if experts else 0
    return 2 * model.hidden * (experts + wide)


def part_costs(once: Once, repeated: UniformRecompute | None) -> tuple[Fraction, Fraction]:
    """FLOPs per token, forward and backward, that a layer and the head add to a stage; the
    embedding adds none."""
    layer, head = Fraction(3 * once.layer), Fraction(3 * once.head)
    if repeated is None:
        return layer, head
    kept = once.scores if repeated.policy.keeps_attention else 0
    if repeated.stage:
        return layer + once.layer - kept, head + once.last + once.head
    if "block" in repeated.policy.recompute:
        layer += once.layer - kept - Fraction(once.last, repeated.span)
    else:
        layer += _modules_again(once, repeated.policy)
    return layer, head


def _modules_again(once: Once, policy: BlockPolicy) -> Exact:
    """FLOPs of the modules of a layer that are run again by themselves."""
    attends = "attention" in policy.recompute and not policy.keeps_attention
    return attends * once.scores + ("experts" in policy.recompute) * once.experts


def stage_work(
    once: Callable[[int], Once],
    stage: StageSpec,
    spans: Sequence[BlockSpan],
    *,
    again: bool,
    chunked: bool,
) -> Work:
    """FLOPs of a stage whose blocks keep what `spans` say, `once` being those of a layer.

    `again`: the stage recomputes as a whole, which is counted in R and not in I. `chunked`: the
    loss is computed in chunks.
    """
    each = [once(layer) for layer in stage.layers]
    whole, scores = sum(one.layer for one in each), sum(one.scores for one in each)
    start, found = 0, 0
    repeated: Exact = 0
    for blocks, policy in spans:
        here = each[start : start + blocks]
        start += blocks
        kept = sum(one.scores for one in here) if policy.keeps_attention else 0
        found += kept
        if "block" in policy.recompute:
            repeated += sum(one.layer for one in here) - here[-1].last - kept
        else:
            repeated += sum(_modules_again(one, policy) for one in here)
    head = once(0).head if stage.head else 0
    left_out = each[-1].last if each and not stage.head else 0
    return Work(
        # a forward without a graph computes the loss, in chunks or not
        F=whole + (head if again or not chunked else 0),
        I=whole + scores + repeated + (3 * head if chunked else head),
        W=whole - scores + (0 if chunked else head),
        R=again * (whole - found - left_out + (0 if chunked else head)),
    )
