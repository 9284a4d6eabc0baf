"""Faults that context parallelism has had, or could have: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.context import score_rects as entries_of
from megapipe.context.documents import within_documents
from megapipe.context.positions import Positions
from megapipe.context.score_rects import ScoreRect
from megapipe.distributed.axis import Axis
from megapipe.layers import attention_tiles, ring_attention, ulysses_all_to_all
from megapipe.layers.context import ContextAttention
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout import buckets
from megapipe.layout.layout import Layout
from megapipe.model.gpt import stage as gpt_stage
from megapipe.ops import score_tiles
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.tile_attention import CpuFlash
from megapipe.optim.optimizer import Optimizer
from megapipe.train.feed import Feed
from tests.parity.faults import Patch
from tests.parity.ranks import Case

RING = Case(cp=2, m=2, model="llama", masked=0.3)
STRIPED = replace(RING, context="striped")
FAR = replace(RING, cp=4, sequence=16)
ULYSSES = replace(RING, context="ulysses")
SLICED = replace(RING, schedule="seq1f1b", slices=2, sequence=16)
_bundle = ring_attention._Run.bundle
_arrived = ring_attention._Run.arrived


def rotary_by_local_row() -> Patch:
    whole = gpt_stage.rotaries

    def wrong(config: Any, here: Positions, *args: Any) -> Any:
        return whole(config, Positions.whole(here.count), *args)

    return mock.patch.object(gpt_stage, "rotaries", wrong)


def learned_positions_by_local_row() -> Patch:
    return mock.patch.object(
        MicroBatch, "positions_of", lambda mb, rows: Positions.whole(rows, mb.start)
    )


def labels_from_the_local_neighbour() -> Patch:
    fetch = Feed.fetch

    def wrong(self: Feed, *args: Any) -> Any:
        found, counted = fetch(self, *args)
        for mb in found.values():
            if mb.labels is not None and mb.tokens is not None:
                mb.labels[:, :-1] = mb.tokens[:, 1:]
        return found, counted

    return mock.patch.object(Feed, "fetch", wrong)


def documents_by_local_row() -> Patch:
    def wrong(found: Any, q: Positions, k: Positions, ids: Any) -> Iterator[ScoreRect]:
        rows = Positions.whole(q.count), Positions.whole(k.count)
        return within_documents(found, *rows, ids)

    return mock.patch.object(attention_tiles, "within_documents", wrong)


def unseen_rows_have_an_lse_of_zero() -> Patch:
    result = ring_attention._Forward._result

    def wrong(self: ring_attention._Forward, queries: int) -> tuple[Tensor, ...]:
        is_new = queries not in self._results
        out, lse = result(self, queries)
        if is_new:
            lse.zero_()
        return out, lse

    return mock.patch.object(ring_attention._Forward, "_result", wrong)


def outputs_merged_without_rescaling() -> Patch:
    def wrong(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
        total = torch.logaddexp(lse, block_lse)
        out += block * (block_lse - total).exp().nan_to_num().unsqueeze(-1)
        lse.copy_(total)

    return mock.patch.object(ring_attention, "merge", wrong)


def gradients_by_the_output_of_one_block() -> Patch:
    """Compute D, the sum of output times gradient, from one tile instead of all keys."""
    right = CpuFlash.backward

    def wrong(self: CpuFlash, **given: Any) -> Any:
        own = {name: given[name] for name in ("q", "k", "v", "causal", "scale")}
        out, _ = self.forward(**own)
        return right(self, **{**given, "out": out})

    return mock.patch.object(CpuFlash, "backward", wrong)


def gradients_of_the_last_hop_lost() -> Patch:
    def wrong(self: Any, what: str, bundle: tuple[str, int]) -> Any:
        found = _arrived(self, what, bundle)
        lost = what == "gradient" and bundle == ("keys", self.me)
        return [] if lost else found

    return mock.patch.object(ring_attention._Run, "arrived", wrong)


def the_home_s_part_added_twice() -> Patch:
    of = ring_attention._Backward._sum

    def wrong(self: Any, kind: Any, owner: int) -> Any:
        if (kind, owner) == ("keys", self.me):
            for total in self._grads_of(kind, owner):
                total.mul_(2)
        return of(self, kind, owner)

    return mock.patch.object(ring_attention._Backward, "_sum", wrong)


def a_stale_bundle() -> Patch:
    """Read buffers one round off."""

    def wrong(self: Any, kind: Any, owner: int) -> Any:
        found = _bundle(self, kind, owner)
        if kind == "queries" or owner == self.me:
            return found
        before = vars(self).get("before", self.own(kind))
        self.before = found
        return before

    return mock.patch.object(ring_attention._Run, "bundle", wrong)


@contextmanager
def causal_where_strictly_causal() -> Iterator[None]:
    """Use a causal mask in striped order where it should be strictly causal."""
    right = entries_of._striped

    def wrong(queries: Positions, keys: Positions) -> tuple[ScoreRect, ...]:
        (q,) = queries.runs
        whole = slice(0, q.length)
        return (ScoreRect(whole, whole, causal=True),) if right(queries, keys) else ()

    entries_of.score_rects.cache_clear()
    try:
        with mock.patch.object(entries_of, "_striped", wrong):
            yield
    finally:
        entries_of.score_rects.cache_clear()


def heads_in_the_wrong_order() -> Patch:
    right = ulysses_all_to_all._exchange

    def wrong(x: Tensor, split_dim: int, gather_dim: int, axis: Axis) -> Tensor:
        y = right(x, split_dim, gather_dim, axis)
        if gather_dim != 2:
            return y
        return torch.cat(y.chunk(axis.size, gather_dim)[::-1], gather_dim)

    return mock.patch.object(ulysses_all_to_all, "_exchange", wrong)


def gradients_of_copied_key_heads_not_added() -> Patch:
    def wrong(self: ContextAttention, x: Tensor) -> Tensor:
        copies = self.ulysses.size // x.shape[2]
        if copies < 2:
            return x
        rest = x.detach()
        return torch.stack([x, *[rest] * (copies - 1)], 3).flatten(2, 3)

    return mock.patch.object(ContextAttention, "_enough", wrong)


def tokens_counted_over_dp_only() -> Patch:
    def wrong(self: Feed, schedule: Any, own: int) -> int:
        count = torch.tensor([own], dtype=torch.float64)
        return int(self.mesh.ordered_sum(count, "dp").item())

    return mock.patch.object(Feed, "_over_replicas", wrong)


def gradients_summed_over_dp_only() -> Patch:
    right = buckets._groups

    def wrong(config: Any, layout: Layout, *given: Any, **kind: Any) -> Any:
        return [
            replace(group, copies=max(1, group.copies // layout.cp), stride=layout.cp)
            for group in right(config, layout, *given, **kind)
        ]

    return mock.patch.object(buckets, "_groups", wrong)


def norm_counted_once_by_every_rank_of_cp() -> Patch:
    right = Optimizer.finish_reduce

    def wrong(self: Optimizer, loss_scale: float = 1.0) -> Tensor:
        return right(self, loss_scale) * self.mesh.grid.cp

    return mock.patch.object(Optimizer, "finish_reduce", wrong)


def keys_of_an_earlier_slice_from_the_wrong_round() -> Patch:
    def wrong(self: Any, kind: Any, owner: int) -> Any:
        found = _bundle(self, kind, owner)
        earlier = len(found[0]) - len(_bundle(self, "queries", self.me)[0])
        if kind == "queries" or owner == self.me or not earlier:
            return found
        own = self.own("keys")
        return tuple(
            torch.cat((mine[:earlier], its[earlier:])) for mine, its in zip(own, found, strict=True)
        )

    return mock.patch.object(ring_attention._Run, "bundle", wrong)


def distances_by_local_row() -> Patch:
    right = score_tiles._tensor

    def wrong(positions: Positions, q: Tensor) -> Tensor:
        return right(Positions.whole(positions.count), q)

    return mock.patch.object(score_tiles, "_tensor", wrong)


def slopes_of_the_first_heads() -> Patch:
    right = ScoreModifiers.of_heads

    def wrong(self: ScoreModifiers, index: int, parts: int) -> ScoreModifiers:
        return right(self, 0, parts)

    return mock.patch.object(ScoreModifiers, "of_heads", wrong)


FAULTS: dict[Callable[[], Patch], Case] = {
    rotary_by_local_row: RING,
    learned_positions_by_local_row: replace(RING, model="gpt2"),
    labels_from_the_local_neighbour: RING,
    documents_by_local_row: replace(RING, documents=True),
    unseen_rows_have_an_lse_of_zero: replace(FAR, context="teams"),
    outputs_merged_without_rescaling: RING,
    gradients_by_the_output_of_one_block: RING,
    gradients_of_the_last_hop_lost: RING,
    the_home_s_part_added_twice: RING,
    a_stale_bundle: FAR,
    causal_where_strictly_causal: STRIPED,
    heads_in_the_wrong_order: ULYSSES,
    gradients_of_copied_key_heads_not_added: replace(ULYSSES, kv_heads=1),
    tokens_counted_over_dp_only: RING,
    gradients_summed_over_dp_only: RING,
    norm_counted_once_by_every_rank_of_cp: RING,
    keys_of_an_earlier_slice_from_the_wrong_round: SLICED,
    distances_by_local_row: replace(RING, model="capped"),
    slopes_of_the_first_heads: replace(ULYSSES, model="bloom"),
}
