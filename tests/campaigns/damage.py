"""Damage to the files of a checkpoint: bits, lengths, and which files there are.

Of every 56 trials 50 flip a bit, five cut a file and one edits the set of files. All are refused by
the look that a resuming run takes at a checkpoint, and the older one is taken. For all edits, and
as many cut files and flips, a live optimizer is asked to load it, and has to be as it was.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megapipe import TrainStep
from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.find import find_checkpoint
from megapipe.cli import parse
from megapipe.distributed.mesh import Grid
from megapipe.errors import CheckpointError
from megapipe.layout.resolve import resolve
from megapipe.testing import World, run_world
from megapipe.train.resume.choose import choose_start_point
from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record
from tests.campaigns.runs import Layout, Wholes
from tests.parity.stopped_runs import VOCABULARY

SAVED_BY = Layout(4, {"parallel.dp": "2", "parallel.pp": "2"})
LOADED_BY = Layout(2, {"parallel.tp": "2"})
SHORT = {"train.steps": "4"}
PERIOD = 56


def one(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def two(folder: Path, rng: random.Random) -> tuple[Path, Path]:
    a, b = rng.sample(sorted(folder.glob("*.safetensors")), 2)
    return a, b


def swap(new: Path, old: Path, rng: random.Random) -> None:
    a, b = two(new, rng)
    a.rename(new / "x")
    b.rename(a)
    (new / "x").rename(b)


def link(new: Path, old: Path, rng: random.Random) -> None:
    path = one(new, rng)
    path.rename(new.parent / "elsewhere")
    path.symlink_to(new.parent / "elsewhere")


def other_kind(make: Callable[[Path], None]) -> Callable[[Path, Path, random.Random], None]:
    def edit(new: Path, old: Path, rng: random.Random) -> None:
        path = rng.choice(sorted(new.iterdir()))
        path.unlink()
        make(path)

    return edit


EDITS: dict[str, Callable[[Path, Path, random.Random], object]] = {
    "a shard is gone": lambda new, old, rng: one(new, rng).unlink(),
    "the manifest is gone": lambda new, old, rng: (new / "manifest.json").unlink(),
    "all is gone": lambda new, old, rng: [path.unlink() for path in new.iterdir()],
    "one shard more": lambda new, old, rng: shutil.copy(
        one(new, rng), new / f"{rng.randrange(10, 10**5):05d}-0000.safetensors"),
    "a shard has another name": lambda new, old, rng: one(new, rng).rename(
        new / f"{rng.randrange(10, 10**5):05d}-0000.safetensors"),
    "two shards are swapped": swap,
    "a shard is a copy of another": lambda new, old, rng: shutil.copy(*two(new, rng)),
    "a shard of an older checkpoint": lambda new, old, rng: shutil.copy(
        old / (name := one(new, rng).name), new / name),
    "the manifest of an older checkpoint": lambda new, old, rng: shutil.copy(
        old / "manifest.json", new / "manifest.json"),
    "a link": link,
    "a folder": other_kind(Path.mkdir),
    "a pipe": other_kind(lambda path: os.mkfifo(path)),
    "an empty file": other_kind(Path.touch),
    "random bytes": lambda new, old, rng: (path := one(new, rng)).write_bytes(
        rng.randbytes(path.stat().st_size)),
    "a longer file": lambda new, old, rng: (path := rng.choice(sorted(new.iterdir()))).write_bytes(
        path.read_bytes() + rng.randbytes(rng.randint(1, 64))),
}  # fmt: skip


@dataclass(frozen=True)
class Damage:
    kind: str
    what: str
    seed: int
    is_live: bool

    def __str__(self) -> str:
        return f"{self.what}{', into a live optimizer' if self.is_live else ''}"


class Damages(Campaign[Damage]):
    name = "damage"
    full = 200 * PERIOD

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")

    def draw(self, number: int, rng: random.Random) -> Damage:
        place, seed = number % PERIOD, rng.randrange(1 << 60)
        if place == 0:
            return Damage("edit", list(EDITS)[number // PERIOD % len(EDITS)], seed, True)
        if place <= 5:
            return Damage("truncation", "a file is cut", seed, place == 1)
        return Damage("flip", "a bit is flipped", seed, place == 6)

    def run(self, trial: Damage, folder: Path) -> Record:
        run = self._wholes.of(SAVED_BY, **SHORT)
        shutil.copytree(runs.checkpoints(run), runs.checkpoints(folder))
        old, new = sorted(runs.checkpoints(folder).glob("step-*"))
        rng = random.Random(trial.seed)
        if trial.kind == "edit":
            EDITS[trial.what](new, old, rng)
        else:
            path = rng.choice(sorted(new.iterdir()))
            data = bytearray(path.read_bytes())
            at = rng.randrange(len(data))
            if trial.kind == "truncation":
                del data[at:]
            else:
                data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        assert is_refused(new), f"{new} is taken"
        assert find_checkpoint(folder / "runs/run").path == old
        if trial.is_live:
            args = runs.settings(self._wholes.shared, folder, {**LOADED_BY.settings, **SHORT})
            for error, same, taken in run_world(LOADED_BY.ranks, asked_to_load, args, str(new)):
                assert error.startswith("CheckpointError"), error
                assert same, "the live state has changed"
                assert taken == str(old)
        return {"kind": trial.kind, "live": trial.is_live}

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        kinds = Counter(record["kind"] for record in records)
        live = sum(record["live"] for record in records)
        words = {"flip": "bits flipped", "truncation": "files cut", "edit": "sets of files edited"}
        return [
            *(Figure(f"{words[kind]}, the checkpoint refused and the older one taken",
                     f"{count:,}", "all refused") for kind, count in kinds.items()),
            Figure("of these loaded into a live optimizer, which stayed as it was", f"{live:,}"),
        ]  # fmt: skip


def is_refused(path: Path) -> bool:
    """Whether a checkpoint is refused, by the project's own error, by a look at all its bytes."""
    try:
        Checkpoint.open(path).verify(finite=True)
    except CheckpointError:
        return True
    return False


def asked_to_load(world: World, args: list[str], path: str) -> tuple[str, bool, str]:
    """This rank's error when it is to load a checkpoint, whether its weights and states are those
    of before, and the checkpoint that a run would take instead."""
    config, layout = resolve(parse(args).config, world.size, VOCABULARY)
    mesh = world.mesh(Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp))
    step = TrainStep(config, layout, mesh)

    def state() -> list[torch.Tensor]:
        optimizer = step.optimizer
        owned = (values for owned in optimizer.own_slices() for values in owned.values.values())
        return [x.clone() for x in (*owned, *(shard.weights for shard in optimizer.shards))]

    before, error = state(), "none"
    try:
        step.load(path)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    source = choose_start_point(config, Path(path).parent, mesh)
    return error, same, str(source.checkpoint.path) if source.checkpoint is not None else ""
