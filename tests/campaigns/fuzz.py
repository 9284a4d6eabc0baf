"""Mutated input of the four parsers of what others may have written: configurations, manifests,
headers of shards, indices of token files.

Each ends with a result or with the project's own error, in a second of processor time, and with
less than 512 MiB of memory more.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from megapipe import cli
from megapipe.checkpoint import Checkpoint
from megapipe.data.tokens.reader import TokenFile
from megapipe.data.tokens.verify import verify
from megapipe.data.tokens.writer import TokenWriter
from megapipe.errors import MegapipeError
from megapipe.model.tensor_files import SINGLE, TensorFiles
from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record, limit
from tests.campaigns.mutations import mutate_bytes, mutate_json, mutate_text
from tests.campaigns.runs import Layout, Wholes
from tests.parity.jobs import ROOT
from tests.unit.checkpoint.checkpoint_worlds import sealed

SECONDS, BYTES = 1.0, 512 << 20
HANGS_S = 60
VOCABULARY = 257
SAVED_BY = Layout(2, {"parallel.pp": "2"})


@dataclass(frozen=True)
class Input:
    target: str
    seed: int

    def __str__(self) -> str:
        return self.target


class Fuzz(Campaign[Input]):
    name = "fuzz"
    full = 40_000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wholes = Wholes(folder / "shared")
        self._configs = sorted((ROOT / "configs").glob("*.yaml"))
        self._targets = {
            "config": self._config,
            "manifest": self._manifest,
            "shard header": self._shard,
            "idx header": self._index,
        }

    def draw(self, number: int, rng: random.Random) -> Input:
        return Input(list(self._targets)[number % len(self._targets)], rng.randrange(1 << 60))

    def run(self, trial: Input, folder: Path) -> Record:
        parse = self._targets[trial.target](random.Random(trial.seed), folder)
        next(parse)  # makes the input
        outcome, before = "taken", time.process_time()
        with bounded(BYTES):
            try:
                next(parse, None)
            except MegapipeError as error:
                outcome = "refused" if "\n" not in str(error) else "refused in several lines"
        seconds = time.process_time() - before
        assert outcome in ("taken", "refused"), outcome
        assert seconds < SECONDS, f"it takes {seconds:.2f} s"
        return {"target": trial.target, "outcome": outcome, "seconds": seconds}

    def _config(self, rng: random.Random, folder: Path) -> Iterator[None]:
        text = rng.choice(self._configs).read_text()
        data = mutate_text(text, rng).encode(errors="surrogatepass")
        (folder / "c.yaml").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.5 else data)
        yield
        cli.parse([str(folder / "c.yaml")])

    def _checkpoint(self, folder: Path) -> Path:
        """Copy a real checkpoint, and return the path of the copy."""
        run = self._wholes.of(SAVED_BY, **{"train.steps": "2"})
        return Path(shutil.copytree(runs.checkpoints(run) / "step-00000002", folder / "checkpoint"))

    def _manifest(self, rng: random.Random, folder: Path) -> Iterator[None]:
        path = self._checkpoint(folder)
        body = json.loads((path / "manifest.json").read_bytes())["body"]
        if rng.random() < 0.7:
            body = mutate_json(body, rng)
        data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        if rng.random() < 0.4:
            data = mutate_bytes(data, rng)
        (path / "manifest.json").write_bytes(sealed(data))
        yield
        read(path)

    def _shard(self, rng: random.Random, folder: Path) -> Iterator[None]:
        path = self._checkpoint(folder)
        shard = rng.choice(sorted(path.glob("*.safetensors")))
        data = shard.read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")
        same_length = rng.random() < 0.5
        header = mutate_bytes(data[:head], rng, same_length=same_length)
        shard.write_bytes(header + data[head:])
        os.link(shard, folder / SINGLE)
        yield
        first = None
        try:
            read(path)
        except MegapipeError as error:
            first = error
        files = TensorFiles.open(folder)  # which parses it
        for name in files.tensors:
            files.read(name)
        if first is not None:
            raise first

    def _index(self, rng: random.Random, folder: Path) -> Iterator[None]:
        draw = np.random.default_rng(rng.randrange(1 << 32))
        with TokenWriter(folder / "x", np.dtype("<u2"), VOCABULARY) as writer:
            for length in draw.integers(1, 40, rng.randint(1, 30)):
                writer.add(draw.integers(0, VOCABULARY, length).astype("<u2"))
        path = folder / "x.idx"
        same_length = rng.random() < 0.5
        path.write_bytes(mutate_bytes(path.read_bytes(), rng, same_length=same_length))
        yield
        file = TokenFile(folder / "x")
        for lengths in file.document_lengths():
            lengths.sum()
        verify(file, VOCABULARY)

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        counts = Counter((record["target"], record["outcome"]) for record in records)
        return [
            *(Figure(f"inputs of the parser: {target}, all refused by our error or taken",
                     f"{counts[target, 'refused']:,} refused, {counts[target, 'taken']:,} taken")
              for target in self._targets),
            limit("seconds of processor time for one at most",
                  max(record["seconds"] for record in records), SECONDS),
        ]  # fmt: skip


def read(path: Path) -> None:
    """Read all of a checkpoint."""
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names():
        checkpoint.read(name)
    checkpoint.verify(finite=True)


class Hangs(BaseException):
    """The parser does not come back."""


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Limit this process to `nbytes` more memory and to HANGS_S seconds in the block."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"it takes more than {HANGS_S} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
