"""Helpers of the checkpoint tests: ranks as threads, layouts as cuts, hand-made manifests."""

import json
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import torch

from megapipe.checkpoint import (
    Checkpoint,
    Meta,
    Piece,
    Region,
    SingleProcess,
    flat_regions,
    save,
    whole,
)
from megapipe.errors import CheckpointError

META = Meta(
    run_id="a-run",
    layout={"dp": 1, "tp": 1},
    coordinates={"samples": 320, "loss": 2.0},
    config={
        "model.layers": 2,
        "run.name": "ä",
        "pipeline.stage_layout": [1, 2],
        "x": None,
        "y": True,
    },
    digests={"corpus": sha256(b"corpus").hexdigest()},
)


class Shared:
    """What the ranks have said in each exchange, and whether one of them has left."""

    def __init__(self) -> None:
        self.changed, self.rows, self.dead = threading.Condition(), {}, False


class ThreadGroup:
    """A rank of a world of threads; if one leaves, exchanges that lack its part fail."""

    def __init__(self, rank: int, world: int, shared: "Shared") -> None:
        self.rank, self.world, self._shared, self._count = rank, world, shared, 0

    def _exchange(self, value: str | None) -> list[str | None]:
        with self._shared.changed:
            row = self._shared.rows.setdefault(self._count, {})
            row[self.rank] = value
            self._count += 1
            self._shared.changed.notify_all()
            self._shared.changed.wait_for(lambda: len(row) == self.world or self._shared.dead, 10)
            if len(row) < self.world:
                raise RuntimeError("a rank is gone")
            return [row[rank] for rank in range(self.world)]

    def share(self, text: str) -> str:
        return self._exchange(text)[0]

    def agree(self, error: str | None) -> str | None:
        return next((e for e in self._exchange(error) if e is not None), None)


def run_world(world: int, work: Callable[[ThreadGroup], object]) -> list:
    """Run `work` on every rank; returns what each returned or the exception that it raised."""
    shared, results = Shared(), [None] * world

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, world, shared))
        except BaseException as error:
            results[rank] = error
            with shared.changed:
                shared.dead = True
                shared.changed.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    return results


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a small state with every dtype and awkward shapes."""
    g = torch.Generator().manual_seed(seed)
    state = {
        "model/layers.0.mlp.up.weight": torch.randn(2, 8, 12, generator=g).bfloat16(),
        "model/embedding.word.weight": torch.randn(24, 12, generator=g),
        "model/final_norm.weight": torch.randn(12, generator=g, dtype=torch.float64),
        "optimizer.exp_avg/embedding.word.weight": torch.randn(24, 12, generator=g),
        "optimizer.exp_avg/final_norm.weight": torch.randn(12, generator=g),
        "optimizer.step/count": torch.tensor(2**40 + seed),
        "optimizer.empty/none": torch.empty(0, 12),
    }
    state["model/embedding.word.weight"][0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-40])
    return state


def flat_cut(state: dict[str, torch.Tensor], rank: int, world: int) -> Iterator[Piece]:
    """Cut as ZeRO does: equal slices of the concatenated tensors, whatever their boundaries."""
    total = sum(t.numel() for t in state.values())
    begin, end = total * rank // world, total * (rank + 1) // world
    base = 0
    for name, tensor in state.items():
        start, stop = (min(max(x - base, 0), tensor.numel()) for x in (begin, end))
        flat = tensor.reshape(-1)[start:stop]
        if not tensor.numel() and rank == 0:
            yield Piece(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor)
        for at, region in flat_regions(tuple(tensor.shape), start, stop):
            data = flat[at : at + region.numel].view(region.sizes)
            yield Piece(name, tuple(tensor.shape), region, data)
        base += tensor.numel()


def dim_cut(dim: int) -> Callable[[dict[str, torch.Tensor], int, int], Iterator[Piece]]:
    """Cut as tensor parallelism along `dim` does; rank 0 holds what has no such dimension."""

    def cut(state: dict[str, torch.Tensor], rank: int, world: int) -> Iterator[Piece]:
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            if dim < len(shape):
                begin, end = (shape[dim] * r // world for r in (rank, rank + 1))
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[dim], sizes[dim] = begin, end - begin
                data = tensor.narrow(dim, begin, end - begin)
                yield Piece(name, shape, Region(tuple(offsets), tuple(sizes)), data)
            elif rank == 0:
                yield Piece(name, shape, whole(shape), tensor)

    return cut


def save_alone(root: Path, step: int, seed: int = 0, **options: int) -> Path:
    """Write a checkpoint of `tensors(seed)` in one process."""
    pieces = flat_cut(tensors(seed), 0, 1)
    return save(root, step=step, pieces=pieces, meta=META, group=SingleProcess(), **options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bytes are equal, so that NaN equals NaN and 0 differs from -0."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def assert_holds(path: Path, seed: int) -> None:
    """Assert that the checkpoint verifies and holds `tensors(seed)` bit for bit."""
    checkpoint, state = Checkpoint.open(path), tensors(seed)
    checkpoint.verify()
    checkpoint.match({name: tuple(tensor.shape) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert same_bits(checkpoint.read(name), tensor), name


def is_sound(path: Path) -> bool:
    """Whether a checkpoint is as it was written."""
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return False
    return True


def sealed(body: str | bytes) -> bytes:
    """Return a manifest file with this body and a digest that fits it."""
    body = body.encode() if isinstance(body, str) else body
    return b'{"body":' + body + b',"sha256":"' + sha256(body).hexdigest().encode() + b'"}\n'


def edit_manifest(path: Path, edit: Callable[[dict], None]) -> None:
    """Change a manifest's content and seal it again, as an adversary would."""
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    edit(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (path / "manifest.json").write_bytes(sealed(text))
