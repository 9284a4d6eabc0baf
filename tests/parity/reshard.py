"""Layouts that save and load each other's checkpoints, and faults of loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from megapipe import TrainStep
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.writer import Piece
from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import ParamRange
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.shard import Shard
from megapipe.testing import World
from megapipe.train import checkpoint_io
from tests.parity.rank_state import Held, held
from tests.parity.ranks import STEPS, Case, Rows, configure

SMALL = partial(Case, layers=6, vocab=301, sequence=16, dtype="fp32", m=4, moe="every second")
"""A case with tied embeddings, whose vocabulary neither 2 nor 4 divides. Every second layer has
experts, each another number."""
CUT = 1 / 1024
"""A bucket size, MiB, at which stages have several buckets."""

LAYOUTS: dict[str, Case] = {
    "one process": SMALL(m=2),
    "dp 2, bf16, fp32 masters": SMALL(dp=2, dtype="bf16", state_dtype="bf16"),
    "pp 2, bf16, no masters, disk": SMALL(
        pp=2, dtype="bf16", state_dtype="bf16", master="none", offload="disk"
    ),
    "dp 3": SMALL(dp=3, dropout=0.1, reduce_chunk_mib=CUT),
    "pp 3": SMALL(pp=3, uneven=True),
    "dp 3, ZeRO 3": SMALL(dp=3, zero=3),
    "tp 4": SMALL(tp=4, sequence_parallel=True),
    "tp 2 pp 2, V": SMALL(tp=2, pp=2, schedule="zb_v", sequence_parallel=True),
    "pp 4, uneven": SMALL(pp=4, uneven=True, activations="full"),
    "dp 2 pp 2, ZeRO 0": SMALL(dp=2, pp=2, zero=0),
    "dp 2 pp 2, ZeRO 2, chunks": SMALL(
        dp=2, pp=2, chunks=3, schedule="interleaved_1f1b", zero=2, dropout=0.1
    ),
    "dp 4, hybrid ZeRO 3": SMALL(dp=4, zero=3, shard_size=2),
    "dp 2 tp 2, host": SMALL(dp=2, tp=2, sequence_parallel=True, offload="host"),
    "pp 4, replicas": SMALL(pp=4, schedule="chimera"),
    "dp 2 pp 2, replicas, ZeRO 0": SMALL(dp=2, pp=2, schedule="dualpipe", zero=0),
    "dp 2 tp 2 pp 2": SMALL(dp=2, tp=2, pp=2, sequence_parallel=True),
    "dp 2 pp 4, replicas": SMALL(dp=2, pp=4, schedule="chimera"),
    "cp 2": SMALL(cp=2),
    "cp 2 pp 2": SMALL(cp=2, pp=2, context="striped"),
    "cp 2 dp 2, hybrid ZeRO 3": SMALL(cp=2, dp=2, zero=3, shard_size=2, context="ulysses"),
    "dp 2, ep 2, ZeRO 3": SMALL(dp=2, ep=2, zero=3),
    "dp 2 tp 2, ep 4, ZeRO 2": SMALL(dp=2, tp=2, ep=4, zero=2, sequence_parallel=True),
    "dp 2, etp 2": SMALL(dp=2, etp=2),
    "dp 2 tp 2, ep 2 etp 2": SMALL(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    "cp 2 tp 2, ep 2": SMALL(cp=2, tp=2, ep=2, zero=0, sequence_parallel=True),
    "dp 2 pp 2, ep 2, replicas": SMALL(dp=2, pp=2, ep=2, schedule="chimera"),
    "cp 4 tp 2": SMALL(cp=4, tp=2, context="usp", sequence_parallel=True),
}
SIZES = sorted({case.world for case in LAYOUTS.values()})


class Seen(NamedTuple):
    """What a rank holds, and the progress that it has loaded."""

    parts: list[Held]
    updates: int
    samples: int


def of_size(world: int) -> list[str]:
    """Return the layouts of `world` processes."""
    return [name for name, case in LAYOUTS.items() if case.world == world]


def folder_of(root: Path, name: str) -> Path:
    """Return the only checkpoint of a layout, or of a reshard."""
    return root / name / f"step-{STEPS:08d}"


def new_step(world: World, name: str) -> TrainStep:
    """Build a layout, with initial weights of its own."""
    case = LAYOUTS[name]
    config, layout = configure(case)
    mesh = world.mesh(case.grid)
    seed = 100 + list(LAYOUTS).index(name)
    return TrainStep(config, layout, mesh, initial=lambda spec, out: spec.initialise(out, seed))


def look(step: TrainStep) -> Seen:
    position = step.position
    return Seen(held(step), step.optimizer.count, step.samples(max(position.step, STEPS)))


def train_and_save(world: World, names: Sequence[str], root: Path) -> dict[str, Seen]:
    """Train and save each layout; return what this rank then holds."""
    seen = {}
    for name in names:
        step, rows = new_step(world, name), Rows(LAYOUTS[name])
        for i in range(STEPS):
            step.train(i, rows)
        step.settle()
        step.save(root / name, STEPS)
        seen[name] = look(step)
    return seen


def reshard(
    world: World, pairs: Mapping[str, Sequence[str]], root: Path
) -> dict[tuple[str, str], Seen]:
    """Load, for each target, each of its sources, and save it again; return what this rank held.

    A target has trained before, so whatever a load leaves out has values of another run.
    """
    seen = {}
    for target, sources in pairs.items():
        step = new_step(world, target)
        step.train(0, Rows(LAYOUTS[target]))
        step.settle()
        for source in sources:
            seen[source, target] = _moved(step, root, source, f"{source} as {target}")
    return seen


def _moved(step: TrainStep, root: Path, source: str, name: str) -> Seen:
    step.load(folder_of(root, source))
    step.save(root / name, STEPS)
    return look(step)


def reshard_with_faults(
    world: World, source: str, target: str, other: str, root: Path
) -> dict[str, Seen]:
    """Load a source and save it again with each of the faults, after loading `other` each time."""
    step, seen = new_step(world, target), {}
    for fault in FAULTS:
        step.load(folder_of(root, other))
        with fault():
            seen[fault.__name__] = _moved(step, root, source, fault.__name__)
    return seen


def _read(change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace the read of a checkpoint's region by what `change` makes from it."""
    return mock.patch.object(Checkpoint, "read_into", change(Checkpoint.read_into))


def a_region_read_one_too_early() -> AbstractContextManager[Any]:
    """Read a region one too early in the last dimension, unless it begins there."""

    def change(read: Any) -> Any:
        def wrong(self: Checkpoint, out: Tensor, name: str, region: Region) -> None:
            if region.offsets[-1] > 0:
                *rest, last = region.offsets
                region = Region((*rest, last - 1), region.sizes)
            read(self, out, name, region)

        return wrong

    return _read(change)


def two_rectangles_swapped() -> AbstractContextManager[Any]:
    """Swap the two halves of what is read from a matrix."""

    def change(read: Any) -> Any:
        def wrong(self: Checkpoint, out: Tensor, name: str, region: Region) -> None:
            read(self, out, name, region)
            if out.dim() == 2:
                out.copy_(out.roll(len(out) // 2, 0))

        return wrong

    return _read(change)


def one_state_for_the_other() -> AbstractContextManager[Any]:
    def change(read: Any) -> Any:
        def wrong(self: Checkpoint, out: Tensor, name: str, region: Region) -> None:
            read(self, out, name.replace("exp_avg_sq/", "exp_avg/"), region)

        return wrong

    return _read(change)


def a_tied_copy_left_as_it_was() -> AbstractContextManager[Any]:
    """Leave the last stage's tied weights as they are, except the shard that it owns."""
    set_weights, in_place = Shard.set_weights, Shard.weights_in_place

    def is_last(shard: Shard) -> bool:
        return shard.bucket.shared and shard.axis.index == shard.axis.size - 1

    def wrong(self: Shard, entry: ParamRange, values: Tensor) -> None:
        if is_last(self):
            self.set_state("model", entry, values)
        else:
            set_weights(self, entry, values)

    def nowhere(self: Shard, entry: ParamRange) -> Tensor | None:
        return None if is_last(self) else in_place(self, entry)

    return mock.patch.multiple(Shard, set_weights=wrong, weights_in_place=nowhere)


def weights_without_their_masters() -> AbstractContextManager[Any]:
    set_state = Shard.set_state

    def wrong(self: Shard, name: str, entry: ParamRange, values: Tensor) -> None:
        set_state(self, name, entry, values if name != "model" else values.bfloat16().float())

    return mock.patch.object(Shard, "set_state", wrong)


def a_slice_set_one_too_far() -> AbstractContextManager[Any]:
    set_state = Shard.set_state

    def wrong(self: Shard, name: str, entry: ParamRange, values: Tensor) -> None:
        set_state(self, name, entry, values.flatten().roll(1) if name == "exp_avg" else values)

    return mock.patch.object(Shard, "set_state", wrong)


def padding_filled() -> AbstractContextManager[Any]:
    read_region = checkpoint_io.read_region

    def wrong(checkpoint: Any, kind: str, spec: LocalParameter, out: Tensor) -> None:
        read_region(checkpoint, kind, spec, out.fill_(1.0))

    return mock.patch.object(checkpoint_io, "read_region", wrong)


def two_pieces_saved_in_each_others_place() -> AbstractContextManager[Any]:
    """Swap, on each rank, every two pieces of equal size."""
    pieces = checkpoint_io.pieces

    def wrong(optimizer: Optimizer) -> Iterator[Piece]:
        first: dict[tuple[int, ...], Piece] = {}
        for piece in pieces(optimizer):
            other = first.setdefault(piece.region.sizes, piece)
            if other is piece:
                continue
            del first[piece.region.sizes]
            yield replace(piece, tensor=other.tensor)
            yield replace(other, tensor=piece.tensor)
        yield from first.values()

    return mock.patch.object(checkpoint_io, "pieces", wrong)


FAULTS: dict[Callable[[], AbstractContextManager[Any]], str] = {
    a_region_read_one_too_early: "own model/layers.0.attention.out.weight",
    two_rectangles_swapped: "own model/layers.0.attention.qkv.weight",
    one_state_for_the_other: "own optimizer.exp_avg_sq/",
    a_tied_copy_left_as_it_was: "weight model/embedding.word.weight",
    weights_without_their_masters: "own model/",
    a_slice_set_one_too_far: "own optimizer.exp_avg/",
    padding_filled: "embedding.word.weight on rank 1: 304 of 1024 values differ, the first at -1:",
    two_pieces_saved_in_each_others_place: "saved again as another",
}
"""Faults, each with words of the expected error."""
