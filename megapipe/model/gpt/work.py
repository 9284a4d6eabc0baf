"""FLOPs of the operations of a GPT's stages, from the matrix products that they compute.

Padding of the vocabulary, empty expert rows and recomputation count, as a run computes them.
:mod:`megapipe.model.gpt.flops` counts the FLOPs that are needed mathematically.

A linear layer takes equally many FLOPs in F, I and W. Attention's own products have no weights, and
take twice the FLOPs of F in I. If the loss is computed in loss chunks, all three products of the
head are in I (:mod:`megapipe.layers.linear_cross_entropy`). An embedding lookup takes none.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan, padded_vocabulary
from megapipe.model.gpt.flops import layer_flops, row_flops
from megapipe.model.gpt.parameters import known
from megapipe.model.interface import UniformRecompute, Work
from megapipe.model.partition import StageSpec

Exact = int | Fraction


class Once(NamedTuple):
    """FLOPs per token of one forward through a layer, its parts, and the head."""

    layer: Exact
    scores: int
    """Part of `layer`: products of queries, keys and values in attention."""
    experts: Exact
    """Part of `layer` that recomputing the module experts repeats: router and up projection."""
    last: Exact
    """Part of `layer`: its last product, if recomputing the layer can skip it; otherwise 0."""
    head: Exact
    """FLOPs of the head; while the vocabulary size is not known, the FLOPs of a layer instead."""

    @classmethod
    def of(cls, model: ModelConfig, length: int, tp: int, number: int, *, rows: Exact) -> "Once":
        """Count the FLOPs of layer `number` of a resolved model, for sequences of `length` tokens.
        `rows`: expert rows per token, if the layer has experts."""
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
    """Return the input width of a layer's down projections, summed over a token's experts; 0 if
    recomputation cannot skip them."""
    moe = model.moe
    if not experts:
        return known(model.ffn_hidden)
    if moe.shared_gate != "none":  # the gate multiplies the output
        return 0
    return rows * known(moe.expert_ffn_hidden) + (moe.shared_ffn_hidden or 0)


def _first_products(model: ModelConfig, experts: int, rows: Exact) -> Exact:
    """Return the FLOPs per token of a router with `experts` experts and of their up projections."""
    wide = rows * known(model.moe.expert_ffn_hidden) * (2 if model.gated else 1) if experts else 0
    return 2 * model.hidden * (experts + wide)


def part_costs(once: Once, repeated: UniformRecompute | None) -> tuple[Fraction, Fraction]:
    """Return the FLOPs per token, forward plus backward, of a layer and of the head. `repeated`:
    recomputation of every layer, if any. The embedding takes no FLOPs."""
    layer, head = Fraction(3 * once.layer), Fraction(3 * once.head)
    if repeated is None:
        return layer, head
    kept = once.scores if repeated.policy.saves_attention else 0
    if repeated.stage:
        return layer + once.layer - kept, head + once.last + once.head
    if "block" in repeated.policy.recompute:
        layer += once.layer - kept - Fraction(once.last, repeated.span)
    else:
        layer += _recomputed_modules(once, repeated.policy)
    return layer, head


def _recomputed_modules(once: Once, policy: BlockPolicy) -> Exact:
    """Return the FLOPs of a layer's modules that are recomputed by themselves (selective)."""
    attends = "attention" in policy.recompute and not policy.saves_attention
    return attends * once.scores + ("experts" in policy.recompute) * once.experts


def stage_work(
    once: Callable[[int], Once],
    stage: StageSpec,
    spans: Sequence[BlockSpan],
    *,
    recompute: bool,
    chunked: bool,
) -> Work:
    """Return FLOPs per token of a stage. `once`: function from a layer's index to the FLOPs of its
    forward. `spans`: recomputation of the stage's layers, in order.

    `recompute`: whether the stage is recomputed as a whole, which counts in R, not in I. `chunked`:
    whether the loss is computed in loss chunks.
    """
    each = [once(layer) for layer in stage.layers]
    whole, scores = sum(one.layer for one in each), sum(one.scores for one in each)
    start, found = 0, 0
    repeated: Exact = 0
    for blocks, policy in spans:
        here = each[start : start + blocks]
        start += blocks
        kept = sum(one.scores for one in here) if policy.saves_attention else 0
        found += kept
        if "block" in policy.recompute:
            repeated += sum(one.layer for one in here) - here[-1].last - kept
        else:
            repeated += sum(_recomputed_modules(one, policy) for one in here)
    head = once(0).head if stage.head else 0
    left_out = each[-1].last if each and not stage.head else 0
    return Work(
        # a forward without a graph computes the loss, in chunks or not
        F=whole + (head if recompute or not chunked else 0),
        I=whole + scores + repeated + (3 * head if chunked else head),
        W=whole - scores + (0 if chunked else head),
        R=recompute * (whole - found - left_out + (0 if chunked else head)),
    )
