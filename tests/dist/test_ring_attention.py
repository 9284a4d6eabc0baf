"""Attention over split positions: what every plan computes, and the messages that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.assembly.context import make_context
from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.context.score_rects import ScoreRect
from megapipe.distributed.collectives import all_gather, reduce_scatter, start_all_to_all
from megapipe.distributed.exchange import PeerMessage, PendingExchange, start_exchange
from megapipe.distributed.mesh import Grid
from megapipe.layers import ring_attention
from megapipe.layers import ulysses_all_to_all as reshard_module
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layers.ulysses_all_to_all import ulysses_all_to_all
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.documents import Documents
from megapipe.ops.scores import PLAIN
from megapipe.ops.tile_attention import CpuFlash, MathTile
from megapipe.plan.context_options import Attention, CpTopology, bytes_sent
from megapipe.plan.unit import on_the_wire
from megapipe.testing import World, run_world
from megapipe.util.dtypes import Dtype
from tests.parity.tiers import in_parts

B, D = 2, 8


@dataclass(frozen=True)
class Setting:
    """A context-parallel group and what it attends with."""

    cp: int
    keys: tuple[str, ...] = ()
    heads: int = 4
    groups: int = 4
    explicit: bool = False
    rows: int = 4
    """Number of positions of a rank."""
    dtype: Dtype = "fp64"
    documents: bool = False
    """Whether attention ends at documents, of about twelve tokens."""

    def __str__(self) -> str:
        words = " ".join(key.removeprefix("context.") for key in self.keys) or "ring"
        return f"cp {self.cp} {words} heads {self.heads}:{self.groups} {self.dtype}"

    @property
    def length(self) -> int:
        return self.rows * self.cp

    def layout(self) -> Layout:
        return self._resolved()[1]

    def sends(self, what: Pass, index: int) -> int:
        """Return the bytes that a rank sends by the formula that compares ways to attend."""
        config, _ = self._resolved()
        own = Attention.of(config)
        return sum(size for _, size in bytes_sent(own, CpTopology(config), what, index))

    def _resolved(self) -> tuple[Config, Layout]:
        config = parse(
            [
                f"parallel.cp={self.cp}",
                f"model.heads={self.heads}",
                f"model.kv_heads={self.groups}",
                f"model.hidden={self.heads * D}",
                "model.positions=rotary",
                "model.vocab_size=300",
                f"model.dtype={self.dtype}",
                f"train.sequence_length={self.length}",
                f"train.microbatch={B}",
                "train.global_batch=2",
                *(f"context.{key}" for key in self.keys),
            ]
        ).config
        return resolve(config, self.cp, None)


DOUBLE = ("algorithm=double_ring", "inner_ring_size=2")
HELPERS = ("algorithm=helpers", "position_split=contiguous")
SETTINGS = [
    *(Setting(n) for n in (2, 3, 4, 8)),
    *(Setting(n, ("position_split=striped",)) for n in (2, 3, 4)),
    *(Setting(n, ("position_split=contiguous",)) for n in (2, 3)),
    *(Setting(n, ("backward_circulates=queries",), groups=g) for n, g in ((2, 4), (3, 2), (4, 1))),
    *(Setting(n, HELPERS) for n in (2, 3, 4, 8)),
    *(Setting(n, DOUBLE) for n in (4, 6, 8)),
    Setting(6, ("algorithm=double_ring", "inner_ring_size=3", "backward_circulates=queries")),
    Setting(8, ("algorithm=double_ring", "inner_ring_size=4")),
    *(Setting(n, ("algorithm=teams", "team_size=2")) for n in (4, 8)),
    *(Setting(n, ("algorithm=all_gather",)) for n in (2, 4)),
    *(Setting(n, (f"ulysses={n}",), groups=g) for n, g in ((2, 4), (4, 2), (4, 1))),
    Setting(4, ("ulysses=2",), groups=2),
    Setting(4, ("ulysses=2", "rank_order=context_first"), groups=1),
    Setting(8, ("ulysses=2", *DOUBLE)),
    Setting(8, ("ulysses=2", "rank_order=context_first", *DOUBLE)),
    Setting(9, ("algorithm=double_ring", "inner_ring_size=3")),
    Setting(4, groups=2, explicit=True),
    Setting(3, rows=12, documents=True),
    # what travels in the type of accumulation is twice as many bytes there
    *(
        Setting(3, keys, dtype="bf16")
        for keys in ((), ("backward_circulates=keys",), ("backward_circulates=queries",))
    ),
    *(
        Setting(4, keys, dtype="bf16")
        for keys in (("algorithm=teams", "team_size=2"), ("algorithm=all_gather",))
    ),
]


def full_tensors(setting: Setting) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, of all positions: [s, b, heads, d]."""
    generator = torch.Generator().manual_seed(setting.cp)
    counts = (setting.heads, setting.groups, setting.groups, setting.heads)
    dtype = TORCH_DTYPES[setting.dtype]
    return [
        torch.randn(setting.length, B, n, D, generator=generator, dtype=torch.float64).to(dtype)
        for n in counts
    ]


def documents_of(setting: Setting) -> Documents | None:
    if not setting.documents:
        return None
    generator = torch.Generator().manual_seed(setting.cp)
    ends = torch.rand(B, setting.length, generator=generator) < 1 / 12
    return Documents(ends.long().cumsum(-1), torch.device("cpu"))


class Seen(NamedTuple):
    results: list[Any]
    """Output and gradients of this rank's rows."""
    rows: list[int]
    letters: list[tuple[int, int, int, int, int]]
    """Each message in order: exchange, sender, receiver, index among those that the sender has for
    the receiver then, bytes; as the sender and as the receiver sees it."""
    sent: dict[str, int]
    """Bytes of messages of the forward and of the backward."""
    operations: list[tuple[tuple[int, ...], str, str, int]]
    """Each operation in order: the ranks of its group, forward or backward, its name, and bytes of
    the whole tensor; 0 for an exchange of messages, whose bytes differ between ranks."""
    begun: dict[str, list[int]]
    """Numbers of exchanges that the rank has begun when it computes each of its blocks."""


def attend(world: World, settings: Sequence[Setting]) -> list[Seen]:
    return [attend_once(world, setting) for setting in settings]


def attend_once(world: World, setting: Setting) -> Seen:
    layout = setting.layout()
    mesh = world.mesh(Grid(cp=setting.cp))
    context = make_context(layout, mesh, MathTile() if setting.explicit else CpuFlash())
    held = layout.split.local([setting.length], mesh.cp.index)
    rows = list(held.own)
    q, k, v, grad = (x[rows] for x in full_tensors(setting))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    letters: list[tuple[int, int, int, int, int]] = []
    operations: list[tuple[tuple[int, ...], str, str, int]] = []
    sent = {"F": 0, "I": 0}
    begun: dict[str, list[int]] = {"F": [], "I": []}
    phase, number, before = "F", 0, 0
    axis = context.ring.axis

    def spy(
        sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], on: Any
    ) -> PendingExchange:
        nonlocal number
        assert on is axis
        for mine, theirs in ((sends, True), (receives, False)):
            places: dict[int, int] = {}
            for letter in mine:
                place = places[letter.member] = places.get(letter.member, -1) + 1
                ends = (axis.ranks[axis.index], axis.ranks[letter.member])
                size = letter.tensor.nbytes
                letters.append((number, *(ends if theirs else ends[::-1]), place, size))
                sent[phase] += size if theirs else 0
        number += 1
        operations.append((tuple(axis.ranks), phase, "exchange", 0))
        return start_exchange(sends, receives, on)

    def noted(of: Any) -> Any:
        def call(x: Tensor, on: Any) -> Any:
            if on.group is not None:
                whole = x.nbytes * (on.size if of is all_gather else 1)
                name = of.__name__.removeprefix("start_")
                operations.append((tuple(on.ranks), phase, name, whole))
            return of(x, on)

        return call

    def counted(compute: Any) -> Any:
        def call(*args: Any) -> None:
            begun[phase].append(number - before)
            compute(*args)

        return call

    with ExitStack() as spies:
        for run in (ring_attention._Forward, ring_attention._Backward):
            spies.enter_context(mock.patch.object(run, "compute", counted(run.compute)))
        spies.enter_context(mock.patch.object(ring_attention, "start_exchange", spy))
        for of in (all_gather, reduce_scatter, start_all_to_all):
            where = reshard_module if of is start_all_to_all else ring_attention
            spies.enter_context(mock.patch.object(where, of.__name__, noted(of)))
        mb = MicroBatch(0, 0, 0, local_positions=held, documents=documents_of(setting))
        out = context.attend(*leaves, mb, PLAIN, 0)
        phase, before = "I", number
        grads = torch.autograd.grad(out, leaves, grad)
    results = [x.detach().double().numpy() for x in (out, *grads)]
    return Seen(results, rows, letters, sent, operations, begun)


@in_parts("cp", sorted({setting.cp for setting in SETTINGS}), default=[4], full=3)
def test_plans(cp: int) -> None:
    """Output and gradients are those of one process, and each rank sends what the plan says, in an
    order that all members of a group share, before it computes what it has. If all or none of the
    ranks split heads, there are no messages but Ulysses', or the ring's."""
    settings = [setting for setting in SETTINGS if setting.cp == cp]
    for setting, *seen in zip(settings, *run_world(cp, attend, settings), strict=True):
        try:
            check(setting, seen)
        except AssertionError as error:
            error.add_note(str(setting))
            raise


def check(setting: Setting, seen: Sequence[Seen]) -> None:
    q, k, v, grad = full_tensors(setting)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads = [x.permute(1, 2, 0, 3) for x in leaves]
    documents = documents_of(setting)
    seen_by_each: dict[str, Any] = {"is_causal": True}
    if documents is not None:
        seen_by_each = {"attn_mask": documents.mask(setting.length)}
    out = scaled_dot_product_attention(*heads, **seen_by_each, enable_gqa=True).permute(2, 0, 1, 3)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert sorted(row for each in seen for row in each.rows) == list(range(setting.length))
    for each in seen:
        for found, wanted in zip(each.results, exact, strict=True):
            here = torch.from_numpy(found)
            if setting.dtype == "fp64":  # what narrow types round is compared in whole steps
                torch.testing.assert_close(here, wanted[each.rows], rtol=1e-12, atol=1e-12)
    # every letter is told once by its sender and once by its receiver
    told = sorted(letter for each in seen for letter in each.letters)
    assert told[::2] == told[1::2]
    # all members of a group have the same operations of it, in one order
    by_group: dict[tuple[int, ...], list[list[Any]]] = {}
    for each in seen:
        for ranks in {operation[0] for operation in each.operations}:
            own = [operation for operation in each.operations if operation[0] == ranks]
            by_group.setdefault(ranks, []).append(own)
    for ranks, lists in by_group.items():
        assert len(lists) == len(ranks)
        assert all(own == lists[0] for own in lists), ranks
    layout = setting.layout()
    split = layout.split
    members = {"all_to_all": split.ulysses, "all_gather": split.ring, "reduce_scatter": split.ring}
    for index, each in enumerate(seen):
        # the next blocks are in flight before one is computed
        for what in PASSES:
            pairs = layout.context.part(what, split.coordinates(index)[0]).pairs
            early = not layout.context.gathers and split.ring > 1
            rounds = [early * (n + 1) for n, pair in enumerate(pairs) if pair is not None]
            assert each.begun[what] == rounds, what
        for what, total in each.sent.items():
            found = [
                (name, size) for _, when, name, size in each.operations if size and when == what
            ]
            wire = sum(on_the_wire(name, size, members[name]) for name, size in found)
            assert total + wire == setting.sends(what, index), what


def attend_behind_one(world: World, settings: Sequence[Setting]) -> list[Seen]:
    """Messages before a round leave each rank but the first when that has computed the round."""
    exchange = ring_attention._Run._exchange

    def late(run: Any, number: int) -> None:
        if world.rank and number < len(run.pairs):
            dist.recv(torch.empty(1), 0)
        exchange(run, number)

    def told(compute: Any) -> Any:
        def call(*args: Any) -> None:
            compute(*args)
            for other in range(1, world.size if world.rank == 0 else 1):
                dist.send(torch.zeros(1), other)

        return call

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ring_attention._Run, "_exchange", late))
        for run in (ring_attention._Forward, ring_attention._Backward):
            patches.enter_context(mock.patch.object(run, "compute", told(run.compute)))
        return attend(world, settings)


def test_a_round_does_not_wait_for_the_messages_of_the_next() -> None:
    """A rank computes what it has though nobody has sent it anything since the round before."""
    settings = [
        Setting(4, keys)
        for keys in ((), ("backward_circulates=keys",), DOUBLE, ("algorithm=teams", "team_size=2"))
    ]
    for setting, *seen in zip(settings, *run_world(4, attend_behind_one, settings), strict=True):
        check(setting, seen)


def test_bytes_of_the_field() -> None:
    """Bytes that a rank sends for b L G d values of e bytes: the formulas of the papers, in fp64.

    If queries travel: 3/4 of the keys' bytes, and two values a row. Ulysses: 4 b s h / n, and 1/n
    of that stays. Heads over 2 of 4 ranks leave a ring of 2, whose blocks are twice as long.
    """
    unit = B * 4 * 4 * D * 8  # of queries, or of keys, of 4 positions, 4 heads

    def sent(setting: Setting) -> dict[str, int]:
        return {what: setting.sends(what, 0) for what in PASSES}

    lse = B * 4 * 4 * 8
    keys = Setting(4, ("backward_circulates=keys",))
    assert sent(keys) == {"F": 3 * 2 * unit, "I": 3 * 4 * unit}
    assert sent(Setting(4, (*DOUBLE, "backward_circulates=keys"))) == sent(keys)
    # what is fewer bytes travels by itself: queries, unless four heads share one of keys
    assert sent(Setting(4, ("backward_circulates=queries",)))["I"] == 3 * (3 * unit + 2 * lse)
    assert sent(Setting(4)) == sent(Setting(4, ("backward_circulates=queries",)))
    grouped, back = Setting(4, groups=1), Setting(4, ("backward_circulates=queries",), groups=1)
    assert sent(grouped)["I"] == 3 * 4 * unit // 4 < sent(back)["I"]
    teams = sent(Setting(4, ("algorithm=teams", "team_size=2")))["F"]
    assert teams == 4 * unit + lse, "4 units against the ring's 6 (row 6.11)"
    assert sent(Setting(4, ("ulysses=4",))) == {"F": 3 * unit, "I": 3 * unit}
    both = sent(Setting(4, ("ulysses=2",)))
    assert both == {"F": (2 + 2) * unit, "I": (2 + 3) * unit + 2 * lse}


def by_parts(world: World) -> list[Any]:
    """Run a transformer over space and time, split over one of them at a time: two exchanges."""
    mesh = world.mesh(Grid(cp=world.size))
    x, weight, grad = space_and_time()
    own = x.chunk(world.size, 1)[mesh.cp.index].clone().requires_grad_()
    weight.requires_grad_()
    with mock.patch(
        "megapipe.layers.ulysses_all_to_all.start_all_to_all", side_effect=_all_to_all()
    ) as exchanges:
        y = over(own, weight, 0)
        y = ulysses_all_to_all(y, 0, 1, mesh.cp)
        y = over(y, weight, 1)
        grads = torch.autograd.grad(y, [own, weight], grad.chunk(world.size, 0)[mesh.cp.index])
    return [y.detach().numpy(), *(g.numpy() for g in grads), exchanges.call_count]


def _all_to_all() -> Any:
    from megapipe.distributed.collectives import start_all_to_all

    return start_all_to_all


def space_and_time() -> tuple[Tensor, Tensor, Tensor]:
    """Return x [space, time, h], a projection and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 4, 6), (6, 18), (8, 4, 6)
    x, weight, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, weight, grad


def over(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Attend along a dimension of [space, time, h], for each index of the other."""
    q, k, v = (x @ weight).transpose(0, 1 - dim).chunk(3, -1)
    return x + scaled_dot_product_attention(q, k, v).transpose(0, 1 - dim)


@pytest.mark.parametrize("n", [2, 4])
def test_a_sequence_of_two_dimensions(n: int) -> None:
    """There is one exchange per switch, and one back."""
    x, weight, grad = space_and_time()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = over(over(x, weight, 0), weight, 1)
    grad_x, grad_weight = torch.autograd.grad(y, leaves, grad)
    seen = run_world(n, by_parts)
    joined = [torch.cat([torch.from_numpy(s[i]) for s in seen], dim) for i, dim in ((0, 0), (1, 1))]
    torch.testing.assert_close(joined[0], y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(joined[1], grad_x, rtol=1e-12, atol=1e-12)
    total = sum(torch.from_numpy(s[2]) for s in seen)
    torch.testing.assert_close(total, grad_weight, rtol=1e-12, atol=1e-12)
    assert [s[3] for s in seen] == [2] * n


class _Largest(TorchDispatchMode):
    """The largest storages that are made."""

    nbytes = 0
    mask = 0
    """Bytes of the largest storage of booleans."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                size = x.untyped_storage().nbytes()
                self.nbytes = max(self.nbytes, size)
                self.mask = max(self.mask, size if x.dtype == torch.bool else 0)
        return found


def largest_storages(world: World, settings: Sequence[Setting]) -> list[tuple[int, int]]:
    found = []
    for setting in settings:
        with _Largest() as largest:
            attend_once(world, setting)
        found.append((largest.nbytes, largest.mask))
    return found


def test_no_storage_above_a_block() -> None:
    """If scores are written out, those of a block, 1 / n^2 of all, are the most that is ever made;
    with a kernel not even these. Nor is any mask larger, if attention ends at documents."""
    settings = [
        Setting(4, keys, rows=64, explicit=explicit, documents=documents)
        for keys, documents in (
            *(
                ((), False),
                (("backward_circulates=keys",), False),
                (("position_split=striped",), False),
            ),
            *(((), True), (("position_split=contiguous",), True)),
        )
        for explicit in (False, True)
    ]
    block = B * 4 * 64 * 64 * 8
    whole = 4 * B * 4 * 64 * D * 8  # queries of all ranks; the test takes those of each
    assert whole < block
    for setting, *found in zip(settings, *run_world(4, largest_storages, settings), strict=True):
        largest, mask = map(max, zip(*found, strict=True))
        assert largest <= (block if setting.explicit else whole), setting
        assert mask <= (64 * 64 if setting.explicit else B * 4 * 64), setting  # one for each LSE


def test_no_scores_beyond_a_block() -> None:
    """A block of the plan is the most that a kernel is given, 1/n of keys and queries."""
    layout = Setting(4).layout()
    held = layout.split.local([16], 0)
    rows = ring_attention.TileRows(held.blocks, held.blocks)
    entries: list[ScoreRect] = [
        entry for i in range(4) for j in range(4) for entry in rows.entries(i, j)
    ]
    assert max(e.queries.stop - e.queries.start for e in entries) == 4
    assert max(e.keys.stop - e.keys.start for e in entries) == 4
