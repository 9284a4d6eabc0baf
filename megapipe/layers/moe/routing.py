"""Routing: from a router's logits to experts, weights, places, and the terms of the loss.

With p the scores of a token (softmax of its logits, or the sigmoid of each), it goes to the `top_k`
experts with the largest p, or p + bias where experts have biases, with weights p, divided by their
sum if they are normalised, times a scale. All of it is computed in the type of the logits, fp32 or
fp64. Tokens are rows of [s * b], position by position, as the flattened hidden states have them.

The balance term (Switch, Fedus et al., 2101.03961) over a scope of T_g tokens is
L_g = sum over e of f_e P_e, where f_e = E count_e / (k T_g) and P_e is the mean of p_e, normalised
to sum 1. The loss gets balance x T_g / T_all x L_g, T_all being all positions of the global batch,
so the gradient of p_te is balance x f_e / T_all: no size of a layout is in it. Over a whole step
the counts are those of the last one, which are known before anything is chosen. Where bandwidths
are given f_e is multiplied by how far expert e is from the rank of the token
(:func:`distance_factors`; TA-MoE, Chen et al., 2302.09915): then the term has no gradient where
choices are as bandwidths.

Where ranks have parts of a sequence, what is counted are the choices of all of them: places of a
sequence, and counts of a scope. All else is of each token alone.
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
"""Numbers of a layer's routing: :func:`routing_stats`."""


class RoutingResult(NamedTuple):
    """The choice for the tokens of a micro-batch, made once."""

    experts: Tensor
    """[tokens, top_k], int16: those of each token, best first; ~expert where it is dropped."""
    counts: Tensor
    """[scopes, experts], int64: choices that the balance term counts, of a sequence, of all of them
    or of the last step, those of other ranks too; nobody asks for them but in training."""
    rows: ExpertCounts
    """Rows that each rank with some of the experts has for each of all."""


CHOICE = ScratchKey[RoutingResult]("choice")
"""The choice of a first forward; the run that builds the graph takes it out."""


def route_tokens(
    p: Tensor,
    routing: Routing,
    sequences: int,
    shards: TokenShards = WHOLE,
    bias: Tensor | None = None,
    second: Tensor | None = None,
    earlier: SliceRoutingState | None = None,
) -> Tensor:
    """The experts of each token, best first: [tokens, top_k], int16; ~expert where it is dropped.

    `bias` [experts] is added to the scores `p`. Of equal ones the lower expert's goes first. A
    second choice is dropped where twice its share is not above `second` [tokens]. Places that
    `earlier` slices have taken are no longer free.
    """
    biased = p if bias is None else p + bias
    if routing.group_top_k < routing.groups:
        biased = biased.masked_fill(~_in_best_groups(biased, routing), -torch.inf)
    ids = routing.router.choose(biased, routing.top_k)
    found = ids.to(torch.int16)
    if second is not None:
        kept = 2 * _parts(p, ids, routing)[:, 1] > second
        found[:, 1] = torch.where(kept, found[:, 1], ~found[:, 1])
    places = routing.expert_capacity(shards.length(len(p) // sequences))
    if places is None:
        return found
    here = (-1, sequences, routing.top_k)
    everyone = shards.gather(found.view(here)).long()
    weight = routing_weights(p, ids, routing).view(here)
    weight = shards.gather(weight) if routing.drop == "score" else weight
    has = _has_place(everyone, weight, routing, places, earlier)
    return torch.where(shards.local_part(has).flatten(0, 1) | (found < 0), found, ~found)


def _in_best_groups(p: Tensor, routing: Routing) -> Tensor:
    """Whether an expert is in one of the token's groups: those whose two best scores have the
    largest sums. [tokens, experts], bool."""
    grouped = p.unflatten(-1, (routing.groups, -1))
    two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = largest(two, routing.group_top_k)
    inside = torch.zeros_like(two, dtype=torch.bool).scatter_(-1, best, True)
    return inside.unsqueeze(-1).expand_as(grouped).flatten(-2)


def _has_place(
    ids: Tensor,
    weight: Tensor,
    routing: Routing,
    places: int,
    earlier: SliceRoutingState | None,
) -> Tensor:
    """Whether each choice is among the first `places` of its expert and sequence, of whole
    sequences [s, b, k], or of a slice after `earlier` ones where ``drop=position``; those that are
    dropped already take none. `weight` matters to ``drop=score`` alone."""
    sequences = ids.shape[1]
    order = (1, 2, 0) if routing.drop == "choice" else (1, 0, 2)
    listed = ids.permute(order).flatten(1)  # [b, s * k], who comes first first
    ahead = None
    if routing.drop == "score":
        by_position = weight.permute(order).flatten(1)
        ahead = by_position.sort(dim=1, descending=True, stable=True).indices
        listed = listed.gather(1, ahead)
    of_each = routing.experts + 1  # the last line of a sequence is of those that are dropped
    lines = torch.arange(sequences, device=ids.device).unsqueeze(1) * of_each
    listed = torch.where(listed < 0, routing.experts, listed)
    line = (listed + lines).flatten()  # of an expert and a sequence
    number = occurrence_index(line, sequences * of_each)
    if earlier is not None:
        if earlier.capacity_used is not None:
            number += earlier.capacity_used.flatten()[line]
        counts = bincount(line, sequences * of_each)
        earlier.capacity_used = added(earlier.capacity_used, counts.view(sequences, of_each))
    has = (number < places).view_as(listed)
    if ahead is not None:
        has = torch.empty_like(has).scatter_(1, ahead, has)
    back = (2, 0, 1) if routing.drop == "choice" else (1, 0, 2)
    return has.view([ids.shape[dim] for dim in order]).permute(back)


def decode_choices(choice: Tensor) -> Tensor:
    """The experts that :func:`route_tokens` found, those of dropped choices too; int64."""
    return torch.where(choice < 0, ~choice, choice).long()


def routing_weights(p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Weight of each choice, [tokens, k]; that of a dropped one is not given to the others."""
    return _parts(p, ids, routing) * routing.scale


def _parts(p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Scores of each choice, [tokens, k], divided by their sum if weights are normalised."""
    chosen = p.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) if routing.normalise else chosen


def score_grad(grad: Tensor, p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Gradient of the scores, [tokens, experts], from that of the weights."""
    grad = grad * routing.scale
    if routing.normalise:
        chosen = p.gather(-1, ids)
        total = chosen.sum(-1, keepdim=True)
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(p).scatter_(-1, ids, grad)


def count(choice: Tensor, routing: Routing, sequences: int, shards: TokenShards = WHOLE) -> Tensor:
    """Choices of each expert in each scope, [scopes, experts], of what :func:`route_tokens`
    found."""
    ids = decode_choices(choice)
    counted = ids[:, :1] if routing.first_only else ids
    scopes = sequences if routing.scope == "sequence" else 1
    scope = torch.arange(len(ids), device=ids.device).remainder_(scopes).unsqueeze(1)
    size = scopes * routing.experts
    counts = bincount((counted + scope * routing.experts).flatten(), size)
    return shards.all_reduce(counts.view(scopes, -1))


def load_fractions(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """f_e of each scope: E x count / (k x tokens), the latter being all counts. [scopes,
    experts]."""
    return (counts * counts.shape[-1]).to(dtype) / counts.sum(-1, keepdim=True)


def distance_factors(bandwidths: Sequence[float], experts: int, dtype: torch.dtype) -> Tensor:
    """Factors of the shares of experts in the balance term, [experts]: 1 / the bandwidth to the
    rank that has each, divided by their mean. Each rank has as many experts."""
    inverse = 1 / torch.tensor(bandwidths, dtype=torch.float64)
    each = (inverse / inverse.mean()).repeat_interleave(experts // len(bandwidths))
    return each.to(dtype)


def _normalised(p: Tensor, routing: Routing) -> Tensor:
    """Scores that sum to 1."""
    return p if routing.router.sums_to_one else p / p.sum(-1, keepdim=True)


def score_sums(p: Tensor, routing: Routing, scopes: int) -> Tensor:
    """Sums over the tokens of each scope of scores that sum to 1: [scopes, experts]."""
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
    """Numbers of a layer about the tokens here of a micro-batch: how many, sums over them of
    balance and z term, choices dropped, choices of each expert, and those that the balance term of
    the next step counts, if it is not all. [routing.told], fp64.

    The balance term follows from the :func:`score_sums` of all slices; None: more are to come.
    """
    choice = chosen.experts
    ids = decode_choices(choice)
    balance = logits.new_zeros(())
    if spread is not None:
        balance = (spread * _weighed(load_fractions(chosen.counts, spread.dtype), distance)).sum()
    told = [balance, logits.logsumexp(-1).square().sum(), (choice < 0).sum()]
    tokens = torch.full_like(balance, len(logits))
    counts = [bincount(ids.flatten(), routing.experts)]
    if routing.reports_first_choices:
        counts.append(bincount(ids[:, 0], routing.experts))
    numbers = torch.stack([n.double() for n in (tokens, *told)])
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
    """Gradient of the logits, from that of the weights of experts `ids` and from the terms of the
    loss, one position's part in which is multiplied by `unit`; `counts` are those of all chosen,
    and `distance` is that of each expert, if it counts."""
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
