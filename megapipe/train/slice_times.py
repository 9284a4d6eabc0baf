"""``train.py --time-slices`` measures ``pipeline.slice_overhead`` and ``slice_attention``.

Every process runs the layers of one stage, the one with most of them, forward and backward on a
micro-batch whose sequences are cut into 1, 2, 4, 8 and 16 slices of equal length, several times
over. Slices of one length that begin at several places tell the time of attention, and lengths that
differ by far tell the overhead. Peers in tensor parallelism work together, as in a run; the
embedding, the head and messages between stages are left out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from megapipe.assembly.sharding import make_sharding
from megapipe.config.config import Config
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.engine.recorder import Recorder
from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout.cuts import multiple_of, slice_time
from megapipe.layout.layout import Layout
from megapipe.layout.slice_time import CausalFlops
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.schedule.ir import Kind, Op
from megapipe.train.kernels import agreed_kernels

COUNTS = (1, 2, 4, 8, 16)
"""Slices of a sequence."""
ROUNDS = 5
"""How often each cut is timed, after a first time that does not count."""


class Slice(NamedTuple):
    """A slice of a sequence."""

    length: int
    before: int
    """Positions before the slice, which it attends to as well."""


class Fit(NamedTuple):
    """The model of :class:`~megapipe.layout.slice_time.SliceCost` that is nearest to the times."""

    overhead: float
    attention: float
    error: float
    """Root of the mean square of the times' relative errors."""


def report(config: Config, layout: Layout, mesh: ParallelMesh) -> str:
    """Time slices and return lines with the keys that fit the times; all ranks take part."""
    times = measure(config, layout, mesh)
    found = fit(slice_time(config, layout.model).flops, times)
    return (
        f"slices: {len(times)} of {min(times).length} to {max(times).length} tokens, timed "
        f"{ROUNDS} times; the two numbers give their times to {found.error:.1%} (rms)\n"
        f"pipeline.slice_overhead={found.overhead:.3g} "
        f"pipeline.slice_attention={found.attention:.3g}\n"
    )


def measure(config: Config, layout: Layout, mesh: ParallelMesh) -> dict[Slice, float]:
    """Median seconds of forward and backward together, by slice."""
    multiple, rows, model = multiple_of(config), config.train.microbatch, layout.model
    length, dtype = config.train.sequence_length, TORCH_DTYPES[model.dtype]
    stage = _stage(config, layout, mesh)
    recorder = Recorder(mesh.device)

    def hidden(positions: int) -> torch.Tensor:
        (tensor,) = model.output_shape(layout.stage_layers[0], rows, positions)
        return torch.randn(tensor.shape, device=mesh.device).to(dtype)

    def run(cut: Sequence[Slice]) -> list[float]:
        stage.begin(train=True)
        recorder.begin()
        for part, own in enumerate(cut):
            mb = MicroBatch(0, 0, 0, start=own.before, sequence_length=length)
            call = partial(stage.forward, (0, part), hidden(own.length), mb)
            recorder.timed(Op(Kind.F, 0, 0, part), call)()
        for part in reversed(range(len(cut))):
            call = partial(stage.backward, (0, part), hidden(cut[part].length))
            recorder.timed(Op(Kind.B, 0, 0, part), call)()
        seconds = [0.0] * len(cut)
        for op, start, end in recorder.events():
            seconds[op.slice] += end - start
        return seconds

    samples: dict[Slice, list[float]] = defaultdict(list)
    cuts = [_even(length, count, multiple) for count in COUNTS if count * multiple <= length]
    for turn in range(ROUNDS + 1):
        for cut in cuts:
            for own, seconds in zip(cut, run(cut), strict=True):
                if turn:
                    samples[own].append(seconds)
    return {own: statistics.median(seconds) for own, seconds in samples.items()}


def fit(flops: CausalFlops, times: Mapping[Slice, float]) -> Fit:
    """The overhead and attention, neither below 0, with least squares of the relative errors."""
    rows = []
    for length, before in times:
        alone = length * flops(1)
        scores = flops(before + length) - flops(before) - alone
        rows.append([flops(1), alone, scores])
    seconds = torch.tensor(list(times.values()), dtype=torch.float64)
    relative = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    ones = torch.ones_like(seconds)
    fits = []
    for terms in ([0, 1, 2], [0, 1], [1, 2], [1]):
        factors = torch.linalg.lstsq(relative[:, terms], ones).solution
        if factors.min() >= 0 and factors[terms.index(1)] > 0:
            error = (relative[:, terms] @ factors - 1).square().mean().sqrt()
            each = dict(zip(terms, (factors / factors[terms.index(1)]).tolist(), strict=True))
            fits.append(Fit(each.get(0, 0.0), each.get(2, 0.0), float(error)))
    return min(fits, key=lambda found: found.error)


def _stage(config: Config, layout: Layout, mesh: ParallelMesh) -> Stage:
    """The layers of the stage with most of them, with weights of the usual size."""
    widest = max(range(layout.stages), key=lambda stage: len(layout.stage_layers[stage].layers))
    spec = replace(layout.stage_layers[widest], embedding=False, head=False)
    kernels = agreed_kernels(config, layout, mesh, layout.schedule)
    module = layout.model.build(spec, make_sharding(config, mesh, kernels))
    bucket = Bucket(0, list(owned_parameters(module)), Axis.alone(), mesh.device)
    for entry in bucket.entries:
        entry.spec.initialise(bucket.view(bucket.weights, entry), config.run.seed)
    stage = Stage(module, layout.block_policies[widest])
    stage.route_autograd_grads()
    return stage


def _even(length: int, count: int, multiple: int) -> list[Slice]:
    """A sequence in `count` slices of equal length, as near as multiples come to it."""
    points = length // multiple
    ends = [points * index // count * multiple for index in range(count + 1)]
    return [Slice(stop - start, start) for start, stop in pairwise(ends)]
