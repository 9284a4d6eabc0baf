"""Routing: from a router's logits to experts, weights, places, and the terms of the loss.

With p the scores of a token (softmax of its logits, or the sigmoid of each), it goes to the `top_k`
experts with the largest p, with weights p, divided by their sum if they are normalised, times a
scale. All of it is computed in the type of the logits, fp32 or fp64. Tokens are rows of [s * b],
position by position, as the flattened hidden states have them.

The balance term (Switch, Fedus et al., 2101.03961) over a scope of T_g tokens is
L_g = sum over e of f_e P_e, where f_e = E count_e / (k T_g) and P_e is the mean of p_e, normalised
to sum 1. The loss gets balance x T_g / T_all x L_g, T_all being all positions of the global batch,
so the gradient of p_te is balance x f_e / T_all: no size of a layout is in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.moe_specs import Routing


def scores(logits: Tensor, routing: Routing) -> Tensor:
    """[tokens, experts]."""
    return logits.softmax(-1) if routing.softmax else logits.sigmoid()


def choose(p: Tensor, routing: Routing, sequences: int) -> Tensor:
    """The experts of each token, best first: [tokens, top_k], int16; ~expert where it is dropped.

    Of equal scores the lower expert's goes first.
    """
    if routing.group_top_k < routing.groups:
        p = p.masked_fill(~_in_best_groups(p, routing), -torch.inf)
    ids = _largest(p, routing.top_k)
    found = ids.to(torch.int16)
    places = routing.places(len(p) // sequences)
    if places is None:
        return found
    return torch.where(
        _has_place(ids, weights(p, ids, routing), routing, sequences, places), found, ~found
    )


def _largest(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest values of each row, the lower one first where they are equal:
    torch.topk alone gives any of those."""
    most = min(k + 1, values.shape[-1])
    found, columns = values.topk(most, dim=-1)
    tied = (found[:, 1:] == found[:, :-1]).any(-1).nonzero().squeeze(-1)
    if len(tied):
        order = values[tied].sort(dim=-1, descending=True, stable=True).indices
        columns[tied] = order[:, :most]
    return columns[:, :k].contiguous()


def _in_best_groups(p: Tensor, routing: Routing) -> Tensor:
    """Whether an expert is in one of the token's groups: those whose two best scores have the
    largest sums. [tokens, experts], bool."""
    grouped = p.unflatten(-1, (routing.groups, -1))
    two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = _largest(two, routing.group_top_k)
    inside = torch.zeros_like(two, dtype=torch.bool).scatter_(-1, best, True)
    return inside.unsqueeze(-1).expand_as(grouped).flatten(-2)


def _has_place(
    ids: Tensor, weight: Tensor, routing: Routing, sequences: int, places: int
) -> Tensor:
    """Whether each choice is among the first `places` of its expert and sequence. [tokens, k]."""
    of_sequence = ids.view(-1, sequences, routing.top_k)  # [s, b, k]
    order = (1, 2, 0) if routing.drop == "choice" else (1, 0, 2)
    listed = of_sequence.permute(order).flatten(1)  # [b, s * k], who comes first first
    ahead = None
    if routing.drop == "score":
        by_position = weight.view_as(of_sequence).permute(order).flatten(1)
        ahead = by_position.sort(dim=1, descending=True, stable=True).indices
        listed = listed.gather(1, ahead)
    lines = torch.arange(sequences, device=ids.device).unsqueeze(1) * routing.experts
    line = (listed + lines).flatten()  # of an expert and a sequence
    sorted_, index = line.sort(stable=True)
    counts = torch.bincount(line, minlength=sequences * routing.experts)
    first = counts.cumsum(0) - counts
    number = torch.empty_like(line)
    number[index] = torch.arange(len(line), device=ids.device) - first[sorted_]
    has = (number < places).view_as(listed)
    if ahead is not None:
        has = torch.empty_like(has).scatter_(1, ahead, has)
    back = (2, 0, 1) if routing.drop == "choice" else (1, 0, 2)
    shape = [sequences, *(of_sequence.shape[dim] for dim in order[1:])]
    return has.view(shape).permute(back).reshape(ids.shape)


def experts_of(choice: Tensor) -> Tensor:
    """The experts that :func:`choose` found, those of dropped choices too; int64."""
    return torch.where(choice < 0, ~choice, choice).long()


def weights(p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Weight of each choice, [tokens, k]; that of a dropped one is not given to the others."""
    weight = p.gather(-1, ids)
    if routing.normalise:
        weight = weight / weight.sum(-1, keepdim=True)
    return weight * routing.scale


def weights_grad(grad: Tensor, p: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Gradient of the scores, [tokens, experts], from that of the weights."""
    grad = grad * routing.scale
    if routing.normalise:
        chosen = p.gather(-1, ids)
        total = chosen.sum(-1, keepdim=True)
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(p).scatter_(-1, ids, grad)


def shares(ids: Tensor, routing: Routing, sequences: int, dtype: torch.dtype) -> Tensor:
    """f_e of the scope of each sequence: E x count / (k x tokens). [sequences or 1, experts]."""
    counted = ids[:, :1] if routing.first_only else ids
    scopes = sequences if routing.per_sequence else 1
    scope = torch.arange(len(ids), device=ids.device).remainder_(scopes).unsqueeze(1)
    size = scopes * routing.experts
    counts = torch.bincount((counted + scope * routing.experts).flatten(), minlength=size)
    per_scope = counted.numel() // scopes
    return counts.view(scopes, -1).to(dtype) * (routing.experts / per_scope)


def _normalised(p: Tensor, routing: Routing) -> Tensor:
    """Scores that sum to 1."""
    return p if routing.softmax else p / p.sum(-1, keepdim=True)


def load(logits: Tensor, p: Tensor, choice: Tensor, routing: Routing, sequences: int) -> Tensor:
    """Numbers of a layer about a micro-batch: tokens, sums over them of balance and z term, choices
    dropped, and choices of each expert. [NUMBERS + experts], fp64."""
    ids = experts_of(choice)
    share = shares(ids, routing, sequences, p.dtype)
    q = _normalised(p, routing).view(-1, len(share), routing.experts)
    told = [(q * share).sum(), logits.logsumexp(-1).square().sum(), (choice < 0).sum()]
    tokens = torch.full_like(told[0], len(p))
    counts = torch.bincount(ids.flatten(), minlength=routing.experts)
    return torch.cat([torch.stack([n.double() for n in (tokens, *told)]), counts.double()])


def logits_grad(
    grad: Tensor,
    logits: Tensor,
    p: Tensor,
    ids: Tensor,
    routing: Routing,
    sequences: int,
    unit: float,
) -> Tensor:
    """Gradient of the logits, from that of the weights and from the terms of the loss, one
    position's part in which is multiplied by `unit`."""
    of_scores = weights_grad(grad, p, ids, routing)
    if routing.balance:
        share = shares(ids, routing, sequences, p.dtype) * (routing.balance * unit)
        of_shares = share.repeat(len(p) // len(share), 1)
        if not routing.softmax:
            total = p.sum(-1, keepdim=True)
            of_shares = (of_shares - (of_shares * p).sum(-1, keepdim=True) / total) / total
        of_scores += of_shares
    if routing.softmax:
        found = p * (of_scores - (of_scores * p).sum(-1, keepdim=True))
    else:
        found = of_scores * p * (1 - p)
    if routing.z:
        lse = logits.logsumexp(-1, keepdim=True)
        found += (logits - lse).exp() * lse * (2 * routing.z * unit)
    return found
