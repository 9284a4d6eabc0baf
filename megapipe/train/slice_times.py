"""``train.py --time-slices``: measure ``pipeline.options.slice_overhead_tokens`` and
``pipeline.slice_attention_cost``.

Every process runs the layers of one stage, the one with the most layers. It runs forward and
backward several times on a micro-batch whose sequences are cut into 1, 2, 4, 8 and 16 slices of
equal length. The cost of attention follows from slices of one length at different positions, the
overhead from slices of very different lengths. Tensor-parallel peers work together, as in a run.
The embedding, the head and messages between stages are not included.
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
from megapipe.layout.layout import Layout
from megapipe.layout.sequence_slices import multiple_of, slice_time
from megapipe.layout.slice_cost import CausalFlops
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.schedule.ir import Kind, Op
from megapipe.train.kernel_selection import agreed_kernels

COUNTS = (1, 2, 4, 8, 16)
"""Numbers of slices into which a sequence is cut."""
ROUNDS = 5
"""Number of timed rounds over all numbers of slices, after a first round that does not count."""


class Slice(NamedTuple):
    """A slice of a sequence."""

    length: int
    before: int
    """Number of positions before the slice, to which the slice attends too."""


class Fit(NamedTuple):
    """The :class:`~megapipe.layout.slice_cost.SliceCost` model that fits the times best."""

    overhead: float
    attention: float
    error: float
    """Root mean square of the times' relative errors."""


def report(config: Config, layout: Layout, mesh: ParallelMesh) -> str:
    """Measure slice times; return lines with the two settings that fit them best. Collective."""
    times = measure(config, layout, mesh)
    found = fit(slice_time(config, layout.model).flops, times)
    return (
        f"slices: {len(times)} of {min(times).length} to {max(times).length} tokens, timed "
        f"{ROUNDS} times; the two numbers give their times to {found.error:.1%} "
        f"(rms)\npipeline.options.slice_overhead_tokens={found.overhead:.3g} "
        f"pipeline.slice_attention_cost={found.attention:.3g}\n"
    )


def measure(config: Config, layout: Layout, mesh: ParallelMesh) -> dict[Slice, float]:
    """Return the median seconds of each slice, forward and backward together."""
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
    """Fit overhead and attention cost, both at least 0, by least squares of relative errors."""
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
    """Build the layers of the stage with the most layers, with initial weights."""
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
    """Cut a sequence into `count` slices of nearly equal length, each a multiple of `multiple`."""
    points = length // multiple
    ends = [points * index // count * multiple for index in range(count + 1)]
    return [Slice(stop - start, start) for start, stop in pairwise(ends)]
