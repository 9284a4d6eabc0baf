"""Copies of checkpoints in the memory of nodes: what the folder of one node has.

Each copy is a folder there, with files of those ranks that wrote on this node and perhaps of
others; together the nodes have all. Unlike a checkpoint it has no manifest until it is taken up:
that is then made of the receipts of all ranks, by which it is proved complete. ::

    step-00000100-<attempt>        a copy; no two attempts at a step share a name
        facts.json                 what a manifest has besides tensors and files
        receipt-00003.json         what rank 3 has written, with checksums
        00003-0000.safetensors     see megapipe.checkpoint.shard
    .staging-...                   being written, or left behind by a killed process
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from megapipe.checkpoint.durable import create
from megapipe.checkpoint.manifest import (
    Count,
    Key,
    Manifest,
    Positive,
    Receipt,
    Record,
    RunId,
    Sha256,
    build_manifest,
    seal,
    unseal,
)
from megapipe.checkpoint.names import MANIFEST, STAGING_PREFIX
from megapipe.checkpoint.retention import clear_leftovers
from megapipe.checkpoint.writer import Meta
from megapipe.errors import CheckpointError

FACTS = "facts.json"
_NAME = re.compile(r"step-([0-9]{8,15})-([0-9a-f]{16})")
_RECEIPT = re.compile(r"receipt-([0-9]{5,})\.json")


class PartialManifest(Record):
    """The rest of a manifest, without tensors and files, and how many ranks have written it."""

    run_id: RunId
    step: Count
    world: Positive
    layout: dict[Key, JsonValue]
    coordinates: dict[Key, JsonValue]
    config: dict[Key, JsonValue]
    digests: dict[Key, Sha256]

    @classmethod
    def of(cls, step: int, meta: Meta, world: int) -> PartialManifest:
        return cls(
            run_id=meta.run_id,
            step=step,
            world=world,
            layout=dict(meta.layout),
            coordinates=dict(meta.coordinates),
            config=dict(meta.config),
            digests=dict(meta.digests),
        )

    def manifest(self, receipts: list[Receipt]) -> Manifest:
        """The manifest. Raises CheckpointError unless the receipts are of all ranks, and what they
        list is one whole checkpoint."""
        missing = set(range(self.world)) - {receipt.rank for receipt in receipts}
        if missing:
            raise CheckpointError(f"no node has the part of rank {min(missing)}")
        return build_manifest(
            run_id=self.run_id,
            step=self.step,
            layout=self.layout,
            coordinates=self.coordinates,
            config=self.config,
            digests=self.digests,
            receipts=receipts,
        )


class MemoryCheckpointName(NamedTuple):
    """Name of a copy, ordered from old to new."""

    step: int
    attempt: str
    """16 hexadecimal digits."""

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.attempt}"

    @classmethod
    def named(cls, name: str) -> MemoryCheckpointName | None:
        """The copy whose folder has this name; None if it is none's."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), match[2]) if match else None


class NodeFolder:
    """The folder of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def generations(self) -> list[MemoryCheckpointName]:
        """The copies, newest first; none where the folder is gone."""
        names = os.listdir(self.root) if self.root.exists() else []
        found = (MemoryCheckpointName.named(name) for name in names)
        return sorted((each for each in found if each is not None), reverse=True)

    def path(self, generation: MemoryCheckpointName) -> Path:
        return self.root / generation.name

    def staging(self, generation: MemoryCheckpointName) -> Path:
        """Where it is written."""
        return self.root / f"{STAGING_PREFIX}{generation.name}"

    def commit(self, generation: MemoryCheckpointName) -> None:
        """Make what is in its staging folder a copy."""
        os.rename(self.staging(generation), self.path(generation))

    def remove(self, generation: MemoryCheckpointName) -> None:
        """Remove a copy, whether it is being written or there."""
        shutil.rmtree(self.staging(generation), ignore_errors=True)
        try:
            os.rename(self.path(generation), self.staging(generation))
        except OSError:
            return
        shutil.rmtree(self.staging(generation), ignore_errors=True)

    def keep(self, wanted: Callable[[MemoryCheckpointName], bool]) -> None:
        """Remove all other copies, and what killed processes have left."""
        clear_leftovers(self.root)
        for generation in self.generations():
            if not wanted(generation):
                self.remove(generation)


def write_facts(folder: Path, facts: PartialManifest) -> None:
    """Raises CheckpointError."""
    with create(folder / FACTS) as file:
        file.write(seal(facts))


def read_facts(folder: Path) -> PartialManifest | None:
    """The facts; None where they are missing or damaged."""
    try:
        return unseal(folder / FACTS, PartialManifest)
    except CheckpointError:
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make of a copy what a reader opens. Raises CheckpointError or OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    with create(folder / MANIFEST) as file:
        file.write(seal(manifest))


def receipts(folder: Path) -> Iterator[Receipt]:
    """Receipts in the folder, of those that are not damaged."""
    for path in sorted(folder.iterdir()):
        if _RECEIPT.fullmatch(path.name):
            try:
                yield unseal(path, Receipt)
            except CheckpointError:
                continue


def shards(folder: Path) -> set[str]:
    """Names of the shards in the folder."""
    return {path.name for path in folder.glob("*.safetensors")}


def files_of(folder: Path, rank: int) -> list[Path]:
    """All that a rank has written there."""
    return [*folder.glob(f"{rank:05d}-*.safetensors"), *folder.glob(f"receipt-{rank:05d}.json")]
