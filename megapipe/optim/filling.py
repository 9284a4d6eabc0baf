"""The values of parameters, one after the other; threads may fill those that come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import ParamRange, main_dtype
from megapipe.optim.shard import Shard

Fill = Callable[[LocalParameter, Tensor], None]
"""Writes a parameter's region of a global tensor, in full precision, into a host tensor, which may
hold anything before."""


def fill_parameters(
    places: Iterable[tuple[Shard, ParamRange, Tensor | None]], fill: Fill, threads: int = 0
) -> Iterator[tuple[Shard, ParamRange, Tensor]]:
    """Each place with what `fill` writes for it, and zeros where it lies beyond the global tensor;
    the values hold until the next are asked for.

    Where a place comes with flat memory, they are written there, and stay. So many `threads` call
    `fill` for the places ahead. All other values take turns in memory for `threads` + 1 of the
    largest: fresh memory costs as much time as reading what comes into it.
    """
    places = list(places)
    dtypes = [main_dtype(shard.bucket.weights.dtype) for shard, _, _ in places]
    sizes = [
        0 if home is not None else entry.spec.numel * dtype.itemsize
        for (_, entry, home), dtype in zip(places, dtypes, strict=True)
    ]
    memory = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(threads + 1)]

    @torch.no_grad()  # that of the caller holds in its own thread alone
    def work(number: int) -> Tensor:
        _, entry, home = places[number]
        spec, turn = entry.spec, memory[number % len(memory)]
        values = turn[: sizes[number]].view(dtypes[number]) if home is None else home
        values = values.view(spec.sizes)
        if sum(region.numel for _, region in spec.global_regions()) < spec.numel:
            values.zero_()
        fill(spec, values)
        return values

    if threads == 0:
        for number, (shard, entry, _) in enumerate(places):
            yield shard, entry, work(number)
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: list[Future[Tensor]] = []
        for number, (shard, entry, _) in enumerate(places):
            ahead = range(len(begun), min(number + threads + 1, len(places)))
            begun += [pool.submit(work, other) for other in ahead]
            yield shard, entry, begun[number].result()
