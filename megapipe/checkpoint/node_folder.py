"""In-memory checkpoints of a node: folders in the node's memory.

Each folder has the files of the node's ranks, and perhaps files of other nodes' ranks; together the
nodes have all files. Unlike a checkpoint on disk, an in-memory checkpoint has no manifest until it
is loaded: then the manifest is made from all ranks' receipts, which proves that the checkpoint is
complete. ::

    step-00000100-<attempt>        an in-memory checkpoint; <attempt> is a random suffix
        facts.json                 what a manifest has besides tensors and files
        receipt-00003.json         what rank 3 has written, with checksums
        00003-0000.safetensors     see megapipe.checkpoint.shard
    .staging-...                   one that is being written, or that a killed process has left
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
    """A manifest without tensors and files, stored as ``facts.json``; `world`: number of ranks."""

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
        """Complete the manifest with all ranks' receipts. Raises CheckpointError if a receipt is
        missing, or if the receipts do not list one complete checkpoint."""
        missing = set(range(self.world)) - {receipt.rank for receipt in receipts}
        if missing:
            raise CheckpointError(f"no node has the files of rank {min(missing)}")
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
    """The name of an in-memory checkpoint, ordered from old to new."""

    step: int
    attempt: str
    """Random suffix that makes the name unique: 16 hexadecimal digits."""

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.attempt}"

    @classmethod
    def named(cls, name: str) -> MemoryCheckpointName | None:
        """Parse a folder's name; None if it does not name an in-memory checkpoint."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), match[2]) if match else None


class NodeFolder:
    """The in-memory checkpoints of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def generations(self) -> list[MemoryCheckpointName]:
        """Return the in-memory checkpoints, newest first; [] if the folder is gone."""
        names = os.listdir(self.root) if self.root.exists() else []
        found = (MemoryCheckpointName.named(name) for name in names)
        return sorted((each for each in found if each is not None), reverse=True)

    def path(self, generation: MemoryCheckpointName) -> Path:
        return self.root / generation.name

    def staging(self, generation: MemoryCheckpointName) -> Path:
        """Return the folder where an in-memory checkpoint is written before it is committed."""
        return self.root / f"{STAGING_PREFIX}{generation.name}"

    def commit(self, generation: MemoryCheckpointName) -> None:
        """Commit an in-memory checkpoint by renaming its staging folder."""
        os.rename(self.staging(generation), self.path(generation))

    def remove(self, generation: MemoryCheckpointName) -> None:
        """Remove an in-memory checkpoint, committed or not."""
        shutil.rmtree(self.staging(generation), ignore_errors=True)
        try:
            os.rename(self.path(generation), self.staging(generation))
        except OSError:
            return
        shutil.rmtree(self.staging(generation), ignore_errors=True)

    def keep(self, wanted: Callable[[MemoryCheckpointName], bool]) -> None:
        """Keep only the in-memory checkpoints for which `wanted` is true; remove the others and the
        leftovers of killed processes."""
        clear_leftovers(self.root)
        for generation in self.generations():
            if not wanted(generation):
                self.remove(generation)


def write_facts(folder: Path, facts: PartialManifest) -> None:
    """Write the partial manifest ``facts.json`` into a staging folder. Raises CheckpointError."""
    with create(folder / FACTS) as file:
        file.write(seal(facts))


def read_facts(folder: Path) -> PartialManifest | None:
    """Read the partial manifest ``facts.json``; None if it is missing or damaged."""
    try:
        return unseal(folder / FACTS, PartialManifest)
    except CheckpointError:
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which lets a reader open the folder. Raises CheckpointError or
    OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    with create(folder / MANIFEST) as file:
        file.write(seal(manifest))


def receipts(folder: Path) -> Iterator[Receipt]:
    """Yield the undamaged receipts in `folder`."""
    for path in sorted(folder.iterdir()):
        if _RECEIPT.fullmatch(path.name):
            try:
                yield unseal(path, Receipt)
            except CheckpointError:
                continue


def shards(folder: Path) -> set[str]:
    """Return the names of the shard files in the folder."""
    return {path.name for path in folder.glob("*.safetensors")}


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the shard files and the receipt of `rank` in `folder`."""
    return [*folder.glob(f"{rank:05d}-*.safetensors"), *folder.glob(f"receipt-{rank:05d}.json")]
