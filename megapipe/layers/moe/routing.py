"""Routing: from a router's logits to experts, weights, capacity, and the terms of the loss.

A token with scores p (softmax of its logits, or the sigmoid of each) goes to the `top_k` experts
with the largest p, or p + bias if experts have biases. The experts' weights are p, divided by the
sum of the chosen p if normalised, times a scale. Routing uses the type of the logits, fp32 or fp64.
Tokens are the flattened hidden states [s * b], position by position.

The auxiliary loss (Switch, Fedus et al., 2101.03961) over a scope of T_g tokens is L_g = sum over e
of f_e P_e, where f_e = E count_e / (k T_g) and P_e is the mean of p_e, normalised to sum 1. The
term coeff x T_g / T_all x L_g is added to the loss, with T_all positions per global batch, so the
gradient of p_te is coeff x f_e / T_all in every layout. If the scope is a whole step, the counts
are those of the previous step, which are known before any choice. If bandwidths are given, f_e is
multiplied by the distance of expert e from the token's rank (:func:`distance_factors`; TA-MoE, Chen
et al., 2302.09915), so that the term has no gradient if choices follow bandwidths.

If several ranks have parts of a sequence, a sequence's capacity and a scope's counts include the
choices of all these ranks. All else depends on each token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.layers.moe.permutation import ExpertCounts, bincount, occurrence_index
from megapipe.layers.moe.routers import largest
from megapipe.layers.moe.slice_state import SliceRoutingState, added
from megapipe.layers.moe.specs import Routing
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.layers.scratch import ScratchKey

WHOLE = TokenShards()
LOAD = ScratchKey[Tensor]("load")
"""Key of a layer's routing statistics (:func:`routing_stats`)."""


class RoutingResult(NamedTuple):
    """Experts chosen for the tokens of a micro-batch, and their counts."""

    experts: Tensor
    """[tokens, top_k], int16: experts of each token, best first; ~expert for a dropped choice."""
    counts: Tensor
    """[scopes, experts], int64: choices over all ranks that the auxiliary loss counts. A scope is a
    sequence, the micro-batch, or the previous step. Empty outside of training."""
    rows: ExpertCounts
    """Number of rows that each expert-parallel rank has for each expert or slot."""


CHOICE = ScratchKey[RoutingResult]("choice")
"""Key of a first forward's routing result; the forward that builds the graph removes it."""


def route_tokens(
    p: Tensor,
    routing: Routing,
    sequences: int,
    shards: TokenShards = WHOLE,
    bias: Tensor | None = None,
    second: Tensor | None = None,
    earlier: SliceRoutingState | None = None,
) -> Tensor:
    """Return the experts of each token, best first: [tokens, top_k], int16; ~expert if dropped.

    `bias` [experts] is added to the scores `p`. Ties go to the lower expert. `second` [tokens], if
    given, has random numbers: a token's second choice is kept only if twice its unscaled weight
    exceeds the number. Capacity that `earlier` slices have used is not available.
    """
    biased = p if bias is None else p + bias
    if routing.group_top_k < routing.groups:
        biased = biased.masked_fill(~_in_best_groups(biased, routing), -torch.inf)
    ids = routing.router.choose(biased, routing.top_k)
    found = ids.to(torch.int16)
    if second is not None:
        kept = 2 * _parts(p, ids, routing)[:, 1] > second
        found[:, 1] = torch.where(kept, found[:, 1], ~found[:, 1])
    capacity = routing.expert_capacity(shards.length(len(p) // sequences))
    if capacity is None:
        return found
    here = (-1, sequences, routing.top_k)
    everyone = shards.gather(found.view(here)).long()
    weight = routing_weights(p, ids, routing).view(here)
    weight = shards.gather(weight) if routing.drop == "score" else weight
    has = _within_capacity(everyone, weight, routing, capacity, earlier)
    return torch.where(shards.local_part(has).flatten(0, 1) | (found < 0), found, ~found)


def _in_best_groups(p: Tensor, routing: Routing) -> Tensor:
    """Return whether each expert is in one of a token's best groups, [tokens, experts], bool. The
    best groups have the largest sums of their two best scores."""
    grouped = p.unflatten(-1, (routing.groups, -1))
    two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = largest(two, routing.group_top_k)
    inside = torch.zeros_like(two, dtype=torch.bool).scatter_(-1, best, True)
    return inside.unsqueeze(-1).expand_as(grouped).flatten(-2)


def _within_capacity(
    ids: Tensor,
    weight: Tensor,
    routing: Routing,
    capacity: int,
    earlier: SliceRoutingState | None,
) -> Tensor:
    """Return whether each choice is within the `capacity` of its expert and sequence. `ids` [s, b,
    k] cover whole sequences or, only with ``drop=position``, a slice after `earlier` slices.
    Already dropped choices use no capacity. `weight` matters only for ``drop=score``."""
    sequences = ids.shape[1]
    order = (1, 2, 0) if routing.drop == "choice" else (1, 0, 2)
    listed = ids.permute(order).flatten(1)  # [b, s * k], in order of precedence
    ahead = None
    if routing.drop == "score":
        by_position = weight.permute(order).flatten(1)
        ahead = by_position.sort(dim=1, descending=True, stable=True).indices
        listed = listed.gather(1, ahead)
    of_each = routing.experts + 1  # the last index of a sequence is for dropped choices
    lines = torch.arange(sequences, device=ids.device).unsqueeze(1) * of_each
    listed = torch.where(listed < 0, routing.experts, listed)
    line = (listed + lines).flatten()  # one per expert and sequence
    number = occurrence_index(line, sequences * of_each)
    if earlier is not None:
        if earlier.capacity_used is not None:
            number += earlier.capacity_used.flatten()[line]
        counts = bincount(line, sequences * of_each)
        earlier.capacity_used = added(earlier.capacity_used, counts.view(sequences, of_each))
    has = (number < capacity).view_as(listed)
    if ahead is not None:
        has = torch.empty_like(has).scatter_(1, ahead, has)
    back = (2, 0, 1) if routing.drop == "choice" else (1, 0, 2)
    return has.view([ids.shape[dim] for dim in order]).permute(back)


def decode_choices(choice: Tensor) -> Tensor:
    """Decode a result of :func:`route_tokens`: all chosen experts, dropped or not, as int64."""
    return torch.where(choice < 0, ~choice, choice).long()


def routing_weights(p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Return the combine weight of each choice, [tokens, k], whether or not it is dropped."""
    return _parts(p, ids, routing) * routing.scale


def _parts(p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Return the score of each choice, [tokens, k], divided by the token's sum if normalised."""
    chosen = p.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if routing.normalise else chosen


def score_grad(grad: Tensor, p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Map the gradient of combine weights, [tokens, k], to that of scores, [tokens, experts]."""
    grad = grad * routing.scale
    if routing.normalise:
        chosen = p.gather(-1, ids)
        total = chosen.sum(-1, keepdim=True)
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(p).scatter_(-1, ids, grad)


def count(choice: Tensor, routing: Routing, sequences: int, shards: TokenShards = WHOLE) -> Tensor:
    """Count each expert's choices per scope, [scopes, experts], in a result of
    :func:`route_tokens`."""
    ids = decode_choices(choice)
    counted = ids[:, :1] if routing.first_only else ids
    scopes = sequences if routing.scope == "sequence" else 1
    scope = torch.arange(len(ids), device=ids.device).remainder_(scopes).unsqueeze(1)
    size = scopes * routing.experts
    counts = bincount((counted + scope * routing.experts).flatten(), size)
    return shards.all_reduce(counts.view(scopes, -1))


def load_fractions(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the load f_e of each expert in each scope, [scopes, experts]: E x count / sum of
    counts (k x tokens)."""
    return (counts * counts.shape[-1]).to(dtype) / counts.sum(-1, keepdim=True)


def distance_factors(bandwidths: Sequence[float], experts: int, dtype: torch.dtype) -> Tensor:
    """Return weights of the experts' load fractions in the auxiliary loss, [experts]: 1 / bandwidth
    to the expert's rank, divided by the mean. All ranks have equally many experts."""
    inverse = 1 / torch.tensor(bandwidths, dtype=torch.float64)
    each = (inverse / inverse.mean()).repeat_interleave(experts // len(bandwidths))
    return each.to(dtype)


def _normalised(p: Tensor, routing: Routing) -> Tensor:
    """Return scores whose sum over the experts is 1."""
    return p if routing.router.sums_to_one else p / p.sum(-1, keepdim=True)


def score_sums(p: Tensor, routing: Routing, scopes: int) -> Tensor:
    """Sum scores, normalised to sum 1, over the tokens of each scope: [scopes, experts]."""
    return _normalised(p, routing).view(-1, scopes, routing.experts).sum(0)


def _weighed(shares: Tensor, distance: Tensor | None) -> Tensor:
    return shares if distance is None else shares * distance


def routing_stats(
    logits: Tensor,
    chosen: RoutingResult,
    routing: Routing,
    spread: Tensor | None,
    distance: Tensor | None = None,
) -> Tensor:
    """Return a layer's routing statistics over the local tokens of a micro-batch,
    [routing.num_stats], fp64: number of tokens, sums of auxiliary loss and z-loss, dropped choices,
    choices of each expert, and first choices of each expert, if the next step's auxiliary loss
    counts only these.

    `spread` has the :func:`score_sums` of all slices, for the auxiliary loss. It is None before the
    last slice, which reports the auxiliary loss of the sequence.
    """
    choice = chosen.experts
    ids = decode_choices(choice)
    balance = logits.new_zeros(())
    if spread is not None:
        balance = (spread * _weighed(load_fractions(chosen.counts, spread.dtype), distance)).sum()
    totals = [balance, logits.logsumexp(-1).square().sum(), (choice < 0).sum()]
    tokens = torch.full_like(balance, len(logits))
    counts = [bincount(ids.flatten(), routing.experts)]
    if routing.reports_first_choices:
        counts.append(bincount(ids[:, 0], routing.experts))
    numbers = torch.stack([n.double() for n in (tokens, *totals)])
    return torch.cat([numbers, *(n.double() for n in counts)])


def logits_grad(
    grad: Tensor,
    logits: Tensor,
    p: Tensor,
    ids: Tensor,
    counts: Tensor,
    routing: Routing,
    unit: float,
    distance: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits from `grad`, the gradient of the combine weights of `ids`,
    and from auxiliary loss and z-loss. `unit` is the factor of one position's loss terms. `counts`
    has the choices per scope and expert, `distance` the factor of each expert's load, if used."""
    of_scores = score_grad(grad, p, ids, routing)
    if routing.aux_loss_coeff:
        share = _weighed(load_fractions(counts, p.dtype), distance) * (
            routing.aux_loss_coeff * unit
        )
        of_shares = share.repeat(len(p) // len(share), 1)
        if not routing.router.sums_to_one:
            total = p.sum(-1, keepdim=True)
            of_shares = (of_shares - (of_shares * p).sum(-1, keepdim=True) / total) / total
        of_scores += of_shares
    found = routing.router.scores_grad(of_scores, logits, p)
    if routing.z_loss_coeff:
        lse = logits.logsumexp(-1, keepdim=True)
        found += (logits - lse).exp() * lse * (2 * routing.z_loss_coeff * unit)
    return found
