"""Routing against loops: who is chosen among equals, who has a place, what the router is taught."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.layers.moe import routing
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.permutation import Permutation, count_rows
from megapipe.layers.moe.routing import RoutingResult
from megapipe.layers.moe.specs import Drop, Routing, Scope
from megapipe.ops.moe.elementwise import TorchRows

LENGTH, SEQUENCES = 12, 3


def logits_of(experts: int, *, ties: bool = False, seed: int = 0) -> Tensor:
    """Draw logits [s * b, experts]; with `ties` they have few values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    size = (LENGTH * SEQUENCES, experts)
    if ties:
        return torch.randint(3, size, generator=generator).double()
    return torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_equal_scores_go_to_the_lower_expert(k: int, seed: int) -> None:
    how = Routing(7, k)
    p = how.router.scores(logits_of(7, ties=True, seed=seed))
    for row, found in zip(
        p.tolist(), routing.route_tokens(p, how, SEQUENCES).tolist(), strict=True
    ):
        assert found == sorted(range(7), key=lambda e: (-row[e], e))[:k]


def test_all_scores_equal() -> None:
    p = torch.full((6, 8), 0.125)
    assert routing.route_tokens(p, Routing(8, 3), 2).tolist() == [[0, 1, 2]] * 6
    of_groups = Routing(8, 3, groups=4, group_top_k=2)
    assert routing.route_tokens(p, of_groups, 2).tolist() == [[0, 1, 2]] * 6


@pytest.mark.parametrize("ties", [False, True])
def test_experts_are_from_the_best_groups(ties: bool) -> None:
    how = Routing(12, 3, scores="sigmoid", groups=4, group_top_k=2)
    p = how.router.scores(logits_of(12, ties=ties))
    for row, found in zip(
        p.tolist(), routing.route_tokens(p, how, SEQUENCES).tolist(), strict=True
    ):
        groups = [row[3 * g : 3 * g + 3] for g in range(4)]
        two = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(4), key=lambda g: (-two[g], g))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        assert found == sorted(allowed, key=lambda e: (-row[e], e))[:3]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_a_bias_decides_who_is_chosen_and_not_the_weights(groups: int, ties: bool) -> None:
    how = Routing(12, 3, scores="sigmoid", groups=groups, group_top_k=min(groups, 2))
    p = how.router.scores(logits_of(12, ties=ties))
    bias = (torch.arange(12) % 5 - 2) * 0.125  # whose sums with equal scores are equal
    ids = routing.decode_choices(
        routing.route_tokens(p, how, SEQUENCES, routing.WHOLE, bias.double())
    )
    ranked = (p + bias.double()).tolist()
    for row, found in zip(ranked, ids.tolist(), strict=True):
        parts = [range(g * 12 // groups, (g + 1) * 12 // groups) for g in range(groups)]
        two = [sum(sorted((row[e] for e in part), reverse=True)[:2]) for part in parts]
        best = sorted(range(groups), key=lambda g: (-two[g], g))[:2]
        allowed = [e for g in best for e in parts[g]]
        assert found == sorted(allowed, key=lambda e: (-row[e], e))[:3]
    assert not ids.equal(routing.decode_choices(routing.route_tokens(p, how, SEQUENCES)))
    chosen = p.gather(1, ids)
    assert routing.routing_weights(p, ids, how).equal(chosen / chosen.sum(1, keepdim=True))
    assert how.expert_capacity(LENGTH) is None
    scored = replace(how, capacity=0.7, drop="score")
    choice = routing.route_tokens(p, scored, SEQUENCES, routing.WHOLE, bias.double())
    assert routing.decode_choices(choice).equal(ids)
    assert (choice < 0).any()


@pytest.mark.parametrize("normalise", [True, False])
def test_second_choices_are_kept_by_twice_their_share_and_take_no_place_else(
    normalise: bool,
) -> None:
    how = Routing(5, 2, normalise=normalise, scale=3.0, capacity=0.8)
    p = how.router.scores(logits_of(5))
    drawn = logits_of(1, seed=4).sigmoid().squeeze(1)
    choice = routing.route_tokens(p, how, SEQUENCES, routing.WHOLE, None, drawn)
    ids = routing.decode_choices(choice)
    assert ids.equal(routing.decode_choices(routing.route_tokens(p, how, SEQUENCES)))
    taken = [[0] * 5 for _ in range(SEQUENCES)]
    refused = 0
    for j, t in itertools.product(range(2), range(len(p))):
        first, second = p[t, ids[t]].tolist()
        share = second / (first + second) if normalise else second
        asks = j == 0 or 2 * share > drawn[t]
        places = taken[t % SEQUENCES]
        kept = asks and places[ids[t, j]] < (how.expert_capacity(LENGTH) or 0)
        refused += asks and not kept
        places[ids[t, j]] += kept
        assert (choice[t, j] >= 0) == kept
    assert refused


@pytest.mark.parametrize("drop", ["choice", "position", "score"])
@pytest.mark.parametrize("capacity", [0.1, 0.6, 1.0, 1.25, 9.0])
@pytest.mark.parametrize("ties", [False, True])
def test_a_full_expert_refuses_those_who_come_later(
    drop: Drop, capacity: float, ties: bool
) -> None:
    how = Routing(5, 2, capacity=capacity, drop=drop, normalise=False)
    p = how.router.scores(logits_of(5, ties=ties))
    choice = routing.route_tokens(p, how, SEQUENCES)
    ids = routing.decode_choices(choice)
    weight = routing.routing_weights(p, ids, how).tolist()
    assert ids.equal(
        routing.decode_choices(routing.route_tokens(p, replace(how, capacity=None), SEQUENCES))
    )
    dropped = {(t, j) for t, j in itertools.product(range(len(p)), range(2)) if choice[t, j] < 0}
    wanted = set()
    places = how.expert_capacity(LENGTH)
    assert places is not None
    for row in range(SEQUENCES):
        taken = [0] * 5
        own = [(t, j) for t in range(row, len(p), SEQUENCES) for j in range(2)]
        if drop == "choice":
            own.sort(key=lambda each: (each[1], each[0]))
        elif drop == "score":
            own.sort(key=lambda each: (-weight[each[0]][each[1]], each))
        for t, j in own:
            if taken[ids[t, j]] == places:
                wanted.add((t, j))
            else:
                taken[ids[t, j]] += 1
    assert dropped == wanted
    ((*counts,),) = count_rows(choice, 5, Axis.alone()).by_rank
    assert sum(counts) == len(p) * 2 - len(dropped) <= SEQUENCES * places * 5
    rows = Permutation.of(choice, sum(counts))
    assert (rows.row_of_choice == rows.num_rows).sum() == len(dropped)


def test_places_are_those_of_the_number_as_it_is_written() -> None:
    """1.1 x 2 x 50 / 10 is 11, of which floating point makes a little more."""
    assert Routing(10, 2, capacity=1.1).expert_capacity(50) == 11
    assert Routing(3, 1, capacity=0.1).expert_capacity(10) == 1


def test_rows_are_in_the_order_of_experts_and_then_of_tokens() -> None:
    choice = torch.tensor([[2, 0], [0, ~2], [2, 1], [~1, 0]], dtype=torch.int16)
    counts = count_rows(choice, 4, Axis.alone())
    assert counts.by_rank == [[3, 1, 2, 0]]
    dispatch = AllToAllDispatcher(Axis.alone()).dispatch(choice, counts)
    rows = dispatch.rows
    assert dispatch.plan.ends == [3, 4, 6, 6]
    assert rows.choice_of_row[:6].tolist() == [1, 2, 7, 5, 0, 4]
    assert rows.row_of_choice.tolist() == [[4, 0], [1, 6], [5, 3], [6, 2]]
    x = torch.arange(8.0).view(4, 2)
    gathered = rows.permute(x)
    assert gathered.tolist() == [x[t].tolist() for t in (0, 1, 3, 2, 0, 2)]
    combine = dispatch.combine()
    sent = dispatch.dispatch_weights(rows.row_of_choice), dispatch.dispatch_tokens(x)
    for _, numbers, (here,) in dispatch.pipelined_chunks(*sent):
        assert numbers.tolist() == list(range(6))
        assert torch.equal(here, gathered)
        combine.send(here)
    added = rows.unpermute(combine.wait(), torch.float64, TorchRows())
    assert added.tolist() == [(n * x[t]).tolist() for t, n in enumerate((2, 1, 2, 1))]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scope", ["sequence", "microbatch"])
@pytest.mark.parametrize("first_only", [True, False])
def test_gradient_of_the_logits_is_that_of_the_formulas(
    scores: str, normalise: bool, scope: Scope, first_only: bool
) -> None:
    """The loss is the sum over choices of grad x weight, and the terms as the module says them."""
    how = Routing(
        6,
        3,
        scores=scores,
        normalise=normalise,
        scale=1.7,
        aux_loss_coeff=0.3,
        scope=scope,
        first_only=first_only,
        z_loss_coeff=0.2,
    )
    logits = logits_of(6).requires_grad_()
    p = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    ids = routing.decode_choices(routing.route_tokens(p.detach(), how, SEQUENCES))
    weight = p.gather(1, ids)
    if normalise:
        weight = weight / weight.sum(1, keepdim=True)
    grad = logits_of(3, seed=5)
    q = (p / p.sum(1, keepdim=True)).view(LENGTH, SEQUENCES, 6)
    counted = (ids[:, :1] if first_only else ids).view(LENGTH, SEQUENCES, -1)
    balance = logits.new_zeros(())
    for rows in range(SEQUENCES) if scope == "sequence" else [slice(None)]:
        here = counted[:, rows]
        share = torch.bincount(here.flatten(), minlength=6).double() * 6 / here.numel()
        tokens = here.numel() / here.shape[-1]
        balance = balance + tokens * (share * q[:, rows].reshape(-1, 6).mean(0)).sum()
    z = logits.logsumexp(1).square().sum()
    unit = 1 / 50
    objective = (grad * 1.7 * weight).sum() + unit * (0.3 * balance + 0.2 * z)
    (wanted,) = torch.autograd.grad(objective, logits)
    with torch.no_grad():
        choice = ids.to(torch.int16)
        counts = routing.count(choice, how, SEQUENCES)
        found = routing.logits_grad(grad, logits, p, ids, counts, how, unit)
        spread = routing.score_sums(p, how, len(counts))
        told = routing.routing_stats(logits, RoutingResult(choice, counts, ()), how, spread)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    exact = torch.stack([balance, z]).detach()
    torch.testing.assert_close(told[1:3], exact, rtol=1e-13, atol=0)
    assert told[0] == LENGTH * SEQUENCES
    assert told[4:].tolist() == torch.bincount(ids.flatten(), minlength=6).tolist()


def test_the_balance_term_is_one_where_tokens_are_spread_evenly() -> None:
    """Each of four experts gets two of eight choices."""
    p = torch.full((4, 4), 0.25, dtype=torch.float64)
    choice = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int16)
    how = Routing(4, 2, scope="microbatch")
    chosen = RoutingResult(choice, routing.count(choice, how, 1), ())
    told = routing.routing_stats(p.log(), chosen, how, routing.score_sums(p, how, 1))
    assert told[:4].tolist() == [4, 4, 0, 0]


BANDWIDTHS = (4.0, 2.0, 1.0, 1.0)
"""From a rank to those that have two of eight experts each."""


def pull(logits: Tensor, counts: Tensor, how: Routing) -> Tensor:
    """Return the auxiliary loss's gradient at logits [tokens, experts] for `counts` choices."""
    p = how.router.scores(logits)
    ids = p.topk(how.top_k).indices
    distance = routing.distance_factors(BANDWIDTHS, how.experts, p.dtype)
    nothing = torch.zeros(len(p), how.top_k, dtype=p.dtype)
    return routing.logits_grad(nothing, logits, p, ids, counts[None], how, 1.0, distance)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_no_gradient_where_choices_are_as_bandwidths(scores: str) -> None:
    """TA-MoE, at any scores; from an even split the gradient is towards near experts."""
    how = Routing(8, 2, scores=scores, aux_loss_coeff=0.7)
    optimum = torch.tensor([4, 4, 2, 2, 1, 1, 1, 1]) * 9
    assert pull(logits_of(8), optimum, how).abs().max() < 1e-16
    even = pull(logits_of(8), torch.full((8,), 18), how)
    assert even.abs().max() > 1e-2
    share = pull(torch.zeros(1, 8, dtype=torch.float64), torch.full((8,), 18), how)[0]
    assert (share[:4] < 0).all(), "these get more"
    assert (share[4:] > 0).all()


def test_choices_come_to_be_as_bandwidths() -> None:
    """Choices are made as often as their scores say."""
    how = Routing(8, 2, aux_loss_coeff=1.0)
    logits = torch.zeros(1, 8, dtype=torch.float64)
    for _ in range(600):
        counts = (how.router.scores(logits)[0] * 1e12).long()
        logits -= pull(logits, counts, how)
    share = torch.tensor([4, 4, 2, 2, 1, 1, 1, 1], dtype=torch.float64) / 16
    torch.testing.assert_close(how.router.scores(logits)[0], share, rtol=1e-6, atol=0)


def test_distances_are_one_on_average_and_where_all_are_alike() -> None:
    found = routing.distance_factors(BANDWIDTHS, 8, torch.float64)
    assert found.mean().item() == pytest.approx(1, rel=1e-15)
    assert (found[::2] / found[0]).tolist() == pytest.approx([1, 2, 4, 4], rel=1e-15)
    assert routing.distance_factors((7.0,) * 4, 8, torch.float64).tolist() == [1.0] * 8
