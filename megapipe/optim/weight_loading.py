"""Loading of parameters, one after the other, with threads that prefetch the next ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import ParamRange, main_dtype
from megapipe.optim.shard import Shard

Fill = Callable[[LocalParameter, Tensor], None]
"""Function that writes a parameter's region of a global tensor, in full precision, into a host
tensor with undefined values."""


def fill_parameters(
    targets: Iterable[tuple[Shard, ParamRange, Tensor | None]], fill: Fill, threads: int = 0
) -> Iterator[tuple[Shard, ParamRange, Tensor]]:
    """Yield the shard and range of each of `targets` with the values that `fill` writes. Values
    beyond the global tensor are zeros; all values are valid until the next iteration.

    A target is (shard, range, flat memory or None). Values that are written to flat memory stay
    valid. All other values share `threads` + 1 buffers as large as the largest parameter: new
    memory costs as much time as reading the values. `threads` threads prefetch: they call `fill`
    for the next targets.
    """
    targets = list(targets)
    dtypes = [main_dtype(shard.bucket.weights.dtype) for shard, _, _ in targets]
    sizes = [
        0 if flat is not None else entry.spec.numel * dtype.itemsize
        for (_, entry, flat), dtype in zip(targets, dtypes, strict=True)
    ]
    memory = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(threads + 1)]

    @torch.no_grad()  # the caller's no_grad holds only in its thread
    def work(number: int) -> Tensor:
        _, entry, flat = targets[number]
        spec, turn = entry.spec, memory[number % len(memory)]
        values = turn[: sizes[number]].view(dtypes[number]) if flat is None else flat
        values = values.view(spec.sizes)
        if sum(region.numel for _, region in spec.global_regions()) < spec.numel:
            values.zero_()
        fill(spec, values)
        return values

    if threads == 0:
        for number, (shard, entry, _) in enumerate(targets):
            yield shard, entry, work(number)
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: list[Future[Tensor]] = []
        for number, (shard, entry, _) in enumerate(targets):
            ahead = range(len(begun), min(number + threads + 1, len(targets)))
            begun += [pool.submit(work, other) for other in ahead]
            yield shard, entry, begun[number].result()
