"""Rows of experts over a slowed link, in chunks, for :mod:`moe`.

The time of a step is compared with the simulation that plans and ``experts.overlap_chunks=auto``
use. Two processes on gloo train a tiny model whose experts are split over them. Their exchanges run
as ever, and are then held back at the receiver until the link would have delivered them: it has one
message at a time, which takes a latency and its bytes. Weights of rows travel with these and have
no separate latency. Products of experts are computed as ever too, and last as long as requested.
Whoever waits sleeps, so that other programs on the machine matter little.

The simulation knows the link, the time of the products, and that of the step in one chunk without
the link, of the same round. Experts are chosen evenly, as it assumes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from common import Result
from interleaved_timing import WARM_UP, Batch, batches, timed
from step import Size
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layers.moe import dispatch, routing
from megapipe.layers.moe.dispatch import Dispatch
from megapipe.layers.moe.dispatchers import all_to_all
from megapipe.layers.moe.specs import Routing
from megapipe.layers.moe.transfer import AllToAll, Step, Transfer
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import known_speeds
from megapipe.plan.moe.moe_layer_time import AssumedCosts, MoELayerTime, training_passes
from megapipe.plan.units import Units
from megapipe.testing import World, run_world

SIZE = Size("mixtral", layers=2, hidden=64, heads=2, vocab=64, sequence=64, batch=4)
RANKS, EXPERTS, TOP_K, CHUNKS = 2, 8, 2, (1, 2, 4)
PRODUCTS, WAY, LATENCIES = 0.1, 0.05, (0.001, 0.015, 0.08)
"""Seconds of all products of a layer in F and in I, of all rows on the link, and of its latency: in
the simulation each latency has another best number of chunks."""


@dataclass
class SlowLink:
    """Link of a rank to the others."""

    latency: float
    """Latency in seconds."""
    rate: float
    """Bytes per second."""
    free: float = 0.0
    """Time at which it has delivered all that was sent."""

    def due(self, size: float, *, alone: bool) -> float:
        """Return when a message of `size` bytes arrives that is sent now, `alone` or with the last
        one."""
        begin = max(time.perf_counter(), self.free)
        self.free = begin + self.latency * alone + size / self.rate
        return self.free


@contextmanager
def slowed(link: SlowLink) -> Iterator[None]:
    """Send rows over the link, in one hop."""

    class Late(Transfer):
        def __init__(self, rows: Tensor, steps: Iterable[Step], *given: Any) -> None:
            (hop,) = steps
            assert isinstance(hop, AllToAll)
            others = sum(hop.sends) - hop.sends[hop.axis.index]
            size = rows.nbytes * others / sum(hop.sends)
            self._due = link.due(size, alone=rows.dim() > 1)
            super().__init__(rows, [hop], *given)

        def wait(self) -> Tensor:
            rows = super().wait()
            time.sleep(max(0.0, self._due - time.perf_counter()))
            return rows

    with (
        mock.patch.object(dispatch, "Transfer", Late),
        mock.patch.object(all_to_all, "Transfer", Late),
    ):
        yield


@contextmanager
def evenly() -> Iterator[None]:
    """Let tokens choose one expert after the other."""

    def choose(p: Tensor, given: Routing, *_: object) -> Tensor:
        first = TOP_K * torch.arange(len(p)).unsqueeze(1)
        return ((first + torch.arange(TOP_K)) % given.experts).to(torch.int16)

    with mock.patch.object(routing, "route_tokens", choose):
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """Make each chunk last for its part of the time of products."""
    pipelined = Dispatch.pipelined_chunks

    def late(self: Dispatch, *given: Any) -> Iterator[Any]:
        for of_chunk in pipelined(self, *given):
            rows = of_chunk[0].expert_rows
            time.sleep(PRODUCTS * (rows.stop - rows.start) / self.plan.local_expert_rows)
            yield of_chunk

    with mock.patch.object(Dispatch, "pipelined_chunks", late):
        yield


def configured(size: Size, ep: int, **given: dict[str, Any]) -> tuple[Config, Layout]:
    """Return a model of two processes, each with separate samples; `given` are keys by section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "layers": size.layers,
            "hidden": size.hidden,
            "heads": size.heads,
            "vocab_size": size.vocab,
            "moe": {"num_experts": EXPERTS, "top_k": TOP_K},
        },
        "parallel": {"dp": RANKS, "ep": ep, **given.pop("parallel", {})},
        "train": {
            "sequence_length": size.sequence,
            "microbatch": size.batch,
            "global_batch": RANKS * size.batch,
        },
        **given,
    }
    return resolve(Config.model_validate(sections), RANKS, size.vocab)


def train_over(world: World, size: Size, rounds: int) -> list[list[float]]:
    """Return seconds of each round: of a step in one chunk without the link, and over it by latency
    and number of chunks."""
    device = world.mesh(Grid(dp=RANKS)).device
    mesh = ParallelMesh(Grid(dp=RANKS, ep=RANKS), device=device, timeout_s=60.0)
    steps = {
        chunks: TrainStep(*configured(size, RANKS, experts={"overlap_chunks": chunks}), mesh)
        for chunks in CHUNKS
    }
    rows = batches(Batch(size.vocab, RANKS * size.batch, size.batch, size.sequence))
    numbers = dict.fromkeys(CHUNKS, 0)

    def train(chunks: int, _: int = 0) -> None:
        steps[chunks].train(numbers[chunks], rows(numbers[chunks]))
        numbers[chunks] += 1

    def train_late(link: SlowLink, chunks: int, _: int) -> None:
        with slowed(link):
            train(chunks)

    links = [SlowLink(latency, rate_of(size)) for latency in LATENCIES]
    late = [partial(train_late, link, chunks) for link in links for chunks in CHUNKS]
    with evenly(), lasting():
        for chunks in CHUNKS * WARM_UP:
            train(chunks)
        return timed([partial(train, 1), *late], rounds)


def rate_of(size: Size) -> float:
    """Return bytes per second at which the rows of a rank for others take :data:`WAY`. With a row
    goes half of its weight, which is sent one way only."""
    rows = size.batch * size.sequence * TOP_K * (RANKS - 1) / RANKS
    return rows * (4 * size.hidden + 2) / WAY


def exposed(size: Size, latency: float, chunks: int) -> float:
    """Return seconds of a step in which nothing is computed, by the simulation of plans."""
    config, layout = configured(
        size,
        RANKS,
        experts={"overlap_chunks": chunks},
        plan={
            "intra_node_gb_s": rate_of(size) / 1e9,
            "link_latency_us": 1e6 * latency,
            "peak_tflops": 1.0,
        },
    )
    speeds, units = known_speeds(config), Units(config, layout)
    work = MoELayerTime.of(units, speeds, 0, AssumedCosts.of(config))
    speeds = replace(speeds, factor=speeds.factor * PRODUCTS / work.experts)
    passes = training_passes(units, speeds, 0, "all_to_all", chunks)
    return size.layers * sum(each.exposed for each in passes.values())


def compare(rounds: int) -> list[Result]:
    """Compare steps with the simulation, and count latencies with another best number of chunks."""
    ranks = run_world(RANKS, train_over, SIZE, rounds, timeout_s=1800.0)
    plain, *late = (list(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True))
    ratios: dict[tuple[float, int], float] = {}
    others = 0
    for latency in LATENCIES:
        sides = [late.pop(0) for _ in CHUNKS]
        waits = [exposed(SIZE, latency, chunks) for chunks in CHUNKS]
        for chunks, own, wait in zip(CHUNKS, sides, waits, strict=True):
            pairs = zip(own, plain, strict=True)
            ratio = ratios[latency, chunks] = statistics.median(a / (b + wait) for a, b in pairs)
            told = f"{1e3 * statistics.median(own):.1f} ms, {ratio:.3f} of the simulation"
            print(f"latency {1e3 * latency:4.1f} ms, in {chunks}: {told}")
        medians = list(map(statistics.median, sides))
        others += medians.index(min(medians)) != waits.index(min(waits))
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1))
    where = f"latency {1e3 * worst[0]:g} ms, in {worst[1]}: {ratios[worst]:.3f}"
    claim = f"{len(LATENCIES)} slowed links, in 1, 2 or 4 chunks"
    return [
        Result(f"{claim}: step off", 100 * abs(ratios[worst] - 1), 10, "%", f"simulation; {where}"),
        Result(f"{claim}: another is best", others, 0, "links", "simulation"),
    ]
