"""Sums and gathers by messages between all members of an axis, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed import gloo
from megapipe.distributed.collectives import all_gather
from megapipe.distributed.mesh import Grid
from megapipe.testing import World, run_world

LENGTHS = (7, 1 << 19, 64)
"""Lengths of the pieces that are in flight together; the second fills every buffer between
processes."""
Checks = dict[str, bool]


def values(rank: int, n: int) -> Tensor:
    """Return [n], fp32, of all magnitudes: sums of three depend on the order."""
    generator = torch.Generator().manual_seed(1000 * rank + n % 1000)
    return torch.randn(n, generator=generator) * torch.logspace(-4, 4, n)


def in_order(terms: Sequence[Tensor]) -> Tensor:
    first, *others = terms
    total = first.clone()
    for other in others:
        total += other
    return total


def exchange(world: World) -> Checks:
    """Check all operations at once: all are started before any is waited for."""
    axis = world.mesh(Grid(dp=world.size)).dp
    size, me = axis.size, axis.index
    given = [[values(rank, size * n) for rank in range(size)] for n in LENGTHS]
    sums = [in_order(terms) for terms in given]
    kept = [terms[me].clone() for terms in given]
    reduced = [gloo.start_reduce_scatter(whole, axis) for whole in kept]
    totals = [terms[me].clone() for terms in given]
    summed = [gloo.start_all_reduce(total, axis) for total in totals]
    apart = [torch.zeros(size * n) for n in LENGTHS]
    within = [torch.zeros(size * n) for n in LENGTHS]
    pieces = [total.chunk(size)[me].clone() for total in sums]
    for whole, piece in zip(within, pieces, strict=True):
        whole.chunk(size)[me].copy_(piece)
    gathered = [gloo.start_all_gather(*each, axis) for each in zip(apart, pieces, strict=True)]
    gathered += [gloo.start_all_gather(x, x.chunk(size)[me], axis) for x in within]
    for wait in (*reversed(gathered), *summed, *(wait for _, wait in reversed(reduced))):
        wait()
    checks: Checks = {}
    for i, (n, total) in enumerate(zip(LENGTHS, sums, strict=True)):
        checks[f"reduce-scatter {n}"] = reduced[i][0].equal(total.chunk(size)[me])
        checks[f"its input {n}"] = kept[i].equal(given[i][me])
        checks[f"all-reduce {n}"] = totals[i].equal(total)
        checks[f"gather {n}"] = apart[i].equal(total)
        checks[f"gather in place {n}"] = within[i].equal(total)
    return checks


@pytest.mark.parametrize("size", [2, 3])
def test_operations_under_way_together_give_what_they_should(size: int) -> None:
    for checks in run_world(size, exchange):
        wrong = [what for what, right in checks.items() if not right]
        assert not wrong


def out_of_step(world: World) -> list[bool]:
    """Let some ranks wait for an all-reduce before they start two other operations, and some
    after."""
    axis = world.mesh(Grid(dp=world.size)).dp
    n = axis.size * LENGTHS[1]
    given = [[values(10 * i + rank, n) for rank in range(axis.size)] for i in range(2)]
    first, second = (terms[axis.index].clone() for terms in given)
    gathered = torch.zeros(n)
    own = in_order(given[1]).chunk(axis.size)[axis.index]
    wait_first = gloo.start_all_reduce(first, axis)
    if axis.index % 2:
        wait_first()
    wait_second = gloo.start_all_reduce(second, axis)
    wait_gather = gloo.start_all_gather(gathered, own, axis)
    if axis.index % 2 == 0:
        wait_first()
    wait_second()
    wait_gather()
    return [
        first.equal(in_order(given[0])),
        second.equal(in_order(given[1])),
        gathered.equal(second),
    ]


def test_members_need_not_start_and_wait_in_step() -> None:
    for rank in run_world(3, out_of_step):
        assert rank == [True, True, True]


def sent_by_an_all_reduce(world: World) -> tuple[Fraction, bool]:
    """Return bytes that this rank sends / bytes of the array, and whether the sums are torch's."""
    axis = world.mesh(Grid(dp=world.size)).dp
    whole = torch.arange(24.0 * axis.size) ** 2 + axis.index  # whole numbers: any order is exact
    expected = whole.clone()
    dist.all_reduce(expected, group=axis.group)
    send, sent = dist.ProcessGroup.send, []

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], *to: int) -> Any:
        sent.extend(tensor.nbytes for tensor in tensors)
        return send(group, tensors, *to)

    with mock.patch.object(dist.ProcessGroup, "send", counted):
        gloo.start_all_reduce(whole, axis)()
    return Fraction(sum(sent), whole.nbytes), whole.equal(expected)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_all_reduce_sends_as_little_as_can_be(n: int) -> None:
    """2 (n - 1) / n of the bytes per member, the lower bound (Patarasuk and Yuan, 2009)."""
    assert run_world(n, sent_by_an_all_reduce) == [(Fraction(2 * (n - 1), n), True)] * n


def test_another_order_of_additions_would_be_noticed() -> None:
    terms = [values(rank, 3 * LENGTHS[1]) for rank in range(3)]
    assert not in_order(terms).equal(in_order(terms[::-1]))


def test_a_sum_is_no_view_of_something_larger() -> None:
    for rank in run_world(3, kept_bytes):
        assert rank == 4 * LENGTHS[1]


def kept_bytes(world: World) -> int:
    axis = world.mesh(Grid(dp=world.size)).dp
    piece, wait = gloo.start_reduce_scatter(torch.ones(axis.size * LENGTHS[1]), axis)
    wait()
    return piece.untyped_storage().nbytes()


def let_go(world: World) -> list[bool]:
    """Start operations that nobody waits for, then one that somebody does."""
    axis = world.mesh(Grid(dp=world.size)).dp
    n = axis.size * LENGTHS[1]
    for _ in range(3):
        gloo.start_reduce_scatter(torch.ones(n), axis)
        gloo.start_all_gather(torch.ones(n), torch.ones(LENGTHS[1]), axis)
        gloo.start_all_reduce(torch.ones(n), axis)
    barrier = all_gather(torch.ones(1), axis)
    piece, wait = gloo.start_reduce_scatter(torch.ones(n), axis)
    wait()
    return [bool(barrier.eq(1).all()), bool(piece.eq(axis.size).all())]


def test_what_is_let_go_of_leaves_nothing_behind() -> None:
    for rank in run_world(3, let_go):
        assert rank == [True, True]
