"""Copies of the state in the memory of the nodes, from which a run goes on whose ranks have died.

A lost rank costs the steps since the last copy, and these are cheap (Wang et al., Gemini, SOSP
2023). At a step boundary every rank writes what it would write into a checkpoint into a folder in
its node's memory, which its launcher has made and which outlives it. With several nodes each then
sends its files to the next one, so that a node that is lost takes one copy of two. The first ranks
of all nodes make a group for that, the second ones another, and so on; of ranks on one node none
has to be sent anything.

At the next start the nodes tell what they have. Of receipts and checksums it follows which copy is
whole, whoever has its parts; a node then gets the files that its ranks need and it lacks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from megapipe.checkpoint.generations import (
    MemoryCheckpointName,
    NodeFolder,
    PartialManifest,
    files_of,
    read_facts,
    receipts,
    shards,
    write_facts,
    write_manifest,
)
from megapipe.checkpoint.manifest import Manifest, Receipt
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.writer import SHARD_BYTES, described, run_on_all, write
from megapipe.config.config import Config
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.file_exchange import exchange_files
from megapipe.distributed.mesh import AXES, ParallelMesh
from megapipe.distributed.nodes import Nodes, cross_node_axis
from megapipe.errors import CheckpointError, ConfigError, LaunchError
from megapipe.plan.memory import COPIES_KEPT
from megapipe.train.state import SaveArguments
from megapipe.util.processes import machine


class MemoryCheckpoints:
    """The copies of one run. `folder` is this node's; all methods are to be called by all ranks."""

    def __init__(self, folder: Path, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._folder = NodeFolder(folder)
        name = hashlib.sha256(f"{machine()} {folder}".encode()).digest()
        self.nodes = Nodes.on(mesh, int.from_bytes(name[:7], "big"))
        self._node = self.nodes.of_rank[mesh.rank]
        self._index = self.nodes.local_index(mesh.rank)
        self._leads = self._index == 0
        self._lane = cross_node_axis(mesh, self.nodes)
        self._where: dict[str, list[int]] = {}
        """On rank 0: the nodes that have a file of the copy that was taken up."""
        self._brought: list[Path] = []
        """Files of that copy that this rank has received."""
        self._on_each_node(lambda: folder.mkdir(mode=0o700, exist_ok=True))

    def check_room(self, parts: Sequence[int]) -> int:
        """Bytes that the node's copies take at most, where rank i writes `parts[i]` bytes. Raises
        CheckpointError on all ranks where a node has no room for its own."""
        kept = {self._node, self.nodes.backup_source(self._node)}
        need = COPIES_KEPT * sum(parts[rank] for node in kept for rank in self.nodes.ranks(node))

        def look() -> None:
            root = self._folder.root
            used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            free = shutil.disk_usage(root).free + used
            if free < need:
                raise CheckpointError(
                    f"{root.parent} has {free / 1e9:.3g} GB free, and checkpoint.memory_every "
                    f"takes {need / 1e9:.3g} GB there, for {COPIES_KEPT} copies of the state: make "
                    "it larger, in a container by --shm-size, or set 0"
                )

        self._on_each_node(look)
        return need

    def _on_each_node(self, work: Callable[[], object]) -> None:
        """Do something on one rank of each node; raises CheckpointError on all where it fails."""
        error = None
        try:
            if self._leads:
                work()
        except (CheckpointError, OSError) as problem:
            error = CheckpointError(described(problem))
        raise_on_all(self._mesh, error)

    def save(self, content: SaveArguments) -> None:
        """Copy the state. Raises CheckpointError on all ranks where one cannot; earlier copies are
        then as they were."""
        facts = PartialManifest.of(content.step, content.meta, self._mesh.world)
        text = self._mesh.share(f"{secrets.token_hex(8)} {facts.model_dump_json()}")
        attempt, _, facts_text = text.partition(" ")
        facts = PartialManifest.model_validate_json(facts_text)
        generation = MemoryCheckpointName(content.step, attempt)
        newest = self._folder.generations()[:1] if self._leads else []
        phases = (
            lambda: self._folder.keep(lambda each: each in newest) if self._leads else None,
            lambda: self._write(generation, content, facts),
            lambda: self._send(generation),
            lambda: self._folder.commit(generation) if self._leads else None,
        )
        try:
            for phase in phases:
                run_on_all(self._mesh, phase)
        except Exception:
            if self._leads:
                self._folder.remove(generation)
            raise

    def _write(
        self, generation: MemoryCheckpointName, content: SaveArguments, facts: PartialManifest
    ) -> None:
        staging, rank = self._folder.staging(generation), self._mesh.rank
        staging.mkdir(exist_ok=True)
        if self._leads:
            write_facts(staging, facts)
        given = (content.step, content.pieces, content.meta, rank, SHARD_BYTES)
        write(staging, *given, weights_apart=True)

    def _send(self, generation: MemoryCheckpointName) -> None:
        """Send the next node the files of this rank, and of those of the node that have no lane."""
        if self._lane.group is None:
            return
        staging, nodes = self._folder.staging(generation), self.nodes
        own = nodes.ranks(self._node)[self._index :: nodes.lanes]
        after = next(node for node in range(nodes.count) if nodes.backup_source(node) == self._node)
        files = [path for rank in own for path in files_of(staging, rank)]
        exchange_files(self._lane, {self._member(after): files}, staging)

    def _member(self, node: int) -> int:
        """The index in this rank's lane of the member on a node."""
        return next(
            i for i, rank in enumerate(self._lane.ranks) if self.nodes.of_rank[rank] == node
        )

    def forget(self, after: int) -> None:
        """Remove copies of more than `after` steps, from which no start is to go on: -1 for all."""
        self._on_each_node(lambda: self._folder.keep(lambda each: each.step <= after))

    def newest(
        self, run: str, above: int, below: int | None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest copy that is whole and intact, of more than `above` steps and less than
        `below`; and a line for each file or copy that is not.

        `run` is the run's folder and name, as in the configuration. Files that the node lacks have
        to be brought (:meth:`fetch`) before they are read.
        """
        reasons: list[str] = []
        own = [each.name for each in self._folder.generations()] if self._leads else []
        names = {name for text in self._gather(json.dumps(own)) for name in json.loads(text)}
        text = self._mesh.share(json.dumps(sorted(names, reverse=True)))  # the step comes first
        for name in json.loads(text):
            generation = MemoryCheckpointName.named(name)
            assert generation is not None, name
            if generation.step > above and (below is None or generation.step < below):
                checkpoint = self._take_up(generation, run, reasons)
                if checkpoint is not None:
                    return checkpoint, reasons
        return None, reasons

    def _take_up(
        self, generation: MemoryCheckpointName, run: str, reasons: list[str]
    ) -> Checkpoint | None:
        """The copy, if it is whole; its `reasons` are told else, and files that are damaged."""
        folder, mesh = self._folder.path(generation), self._mesh
        texts = self._gather(_told(folder) if self._leads else "{}")
        text, problem = "", None
        if mesh.rank == 0:
            try:
                text = _merged(texts, run).model_dump_json()
            except CheckpointError as error:
                problem = f"{folder}: {error}"
        problem = mesh.agree(problem)
        if problem is None:
            manifest = Manifest.model_validate_json(mesh.share(text))
            try:
                if self._leads:
                    folder.mkdir(exist_ok=True)
                    write_manifest(folder, manifest)
            except (CheckpointError, OSError) as error:
                problem = described(error)
            problem = mesh.agree(problem)
        if problem is not None:
            reasons.append(problem)
            return None
        damage = mesh.agree(self._remove_damaged(Checkpoint(folder, manifest)))
        reasons += [] if damage is None else [damage]
        here = shards(folder)
        having = self._gather(json.dumps(sorted(here)) if self._leads else "[]")
        self._where = {}
        for rank, names in enumerate(having):
            for name in json.loads(names):
                self._where.setdefault(name, []).append(self.nodes.of_rank[rank])
        lost = min(manifest.files.keys() - self._where.keys(), default=None)
        missing = f"{folder / str(lost)} is on no node" if mesh.rank == 0 and lost else None
        if (missing := mesh.agree(missing)) is not None:
            reasons.append(missing)
            return None
        return Checkpoint.open(folder, here)

    def _remove_damaged(self, checkpoint: Checkpoint) -> str | None:
        """Remove the files of this rank's share of its node's that are not as they were written, or
        have values that are not finite; says why one of them was."""
        found = None
        folder = self._at(checkpoint)
        files = sorted(shards(folder))
        for name in files[self._index :: len(self.nodes.ranks(self._node))]:
            try:
                if name in checkpoint.manifest.files:  # else its receipt is damaged
                    checkpoint.verify([name], finite=True)
                    continue
            except CheckpointError as error:
                found = str(error)
            (folder / name).unlink()
        return found

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether it is one of these copies."""
        return checkpoint.path == self._at(checkpoint)

    def _at(self, checkpoint: Checkpoint) -> Path:
        return self._folder.root / checkpoint.path.name

    def fetch(self, checkpoint: Checkpoint, needed: set[str]) -> None:
        """Bring what this rank needs of the copy that :meth:`newest` has found to its node.

        Raises LaunchError on all ranks where that fails; the copy is then given up.
        """
        folder, mesh = self._at(checkpoint), self._mesh
        if self.nodes.count == 1:
            return
        wanted = self._gather(json.dumps(sorted(needed - shards(folder))))
        moves = json.loads(mesh.share(json.dumps(self._moves(wanted) if mesh.rank == 0 else [])))
        outgoing: dict[int, list[Path]] = {}
        for number, (name, source, target) in enumerate(moves):
            if source == self._node and number % self.nodes.lanes == self._index:
                outgoing.setdefault(self._member(target), []).append(folder / name)
        problem = None
        try:
            self._brought = exchange_files(self._lane, outgoing, folder) if moves else []
            checkpoint.verify([path.name for path in self._brought])
        except (CheckpointError, OSError) as error:
            problem = described(error)
        problem = mesh.agree(problem)
        if problem is not None:
            self.forget(checkpoint.step - 1)
            raise LaunchError(
                f"the copy of step {checkpoint.step} in memory cannot be brought to all nodes: "
                f"{problem}; the next start begins with an older one"
            )

    def _moves(self, wanted: Sequence[str]) -> list[tuple[str, int, int]]:
        """Files to be sent, from which node to which, by what each rank lacks."""
        pairs = {
            (name, self.nodes.of_rank[rank])
            for rank, names in enumerate(wanted)
            for name in json.loads(names)
        }
        return [
            (name, self._where[name][number % len(self._where[name])], node)
            for number, (name, node) in enumerate(sorted(pairs))
        ]

    def release(self) -> None:
        """Remove the files that were brought, now that they are read."""
        for path in self._brought:
            path.unlink(missing_ok=True)
        self._brought = []

    def _gather(self, text: str) -> list[str]:
        """The texts of all ranks, on rank 0; on others those of some."""
        texts = [text]
        for axis in reversed(AXES):
            rows = self._mesh.gather(json.dumps(texts), axis)
            texts = [each for row in rows for each in json.loads(row)]
        return texts


def memory_copies(
    config: Config, folder: Path | None, mesh: ParallelMesh
) -> MemoryCheckpoints | None:
    """The copies of a run whose launcher has made a `folder`; None if it keeps none.

    Raises :class:`ConfigError` on all ranks where some launcher has made none.
    """
    every, error = config.checkpoint.memory_every, None
    if every and folder is None:
        error = ConfigError(
            f"checkpoint.memory_every={every} needs a folder that a launcher makes in memory: "
            "expected python -m megapipe.launch --restarts N, and a /dev/shm to write to, or 0"
        )
    raise_on_all(mesh, error)
    if folder is None:
        return None
    if not every:  # an earlier start may have had another configuration
        NodeFolder(folder).keep(lambda _: False)
        return None
    return MemoryCheckpoints(folder, mesh)


def _told(folder: Path) -> str:
    """The facts and the receipts that a node has of a copy, as text."""
    if not folder.is_dir():
        return "{}"
    facts = read_facts(folder)
    return json.dumps(
        {
            "facts": None if facts is None else facts.model_dump_json(),
            "receipts": [receipt.model_dump_json() for receipt in receipts(folder)],
        }
    )


def _merged(texts: Sequence[str], run: str) -> Manifest:
    """The manifest of what nodes have told. Raises CheckpointError."""
    told = [json.loads(text) for text in texts]
    facts = [
        PartialManifest.model_validate_json(each["facts"]) for each in told if each.get("facts")
    ]
    if not facts:
        raise CheckpointError("no node has its facts")
    if run != run_of(facts[0].config):
        raise CheckpointError("it is of another run")
    found = [
        Receipt.model_validate_json(text) for each in told for text in each.get("receipts", [])
    ]
    return facts[0].manifest(list({receipt.rank: receipt for receipt in found}.values()))


def run_of(config: Mapping[str, JsonValue]) -> str:
    """Folder and name of a run, by its configuration."""
    return str(Path(str(config["run.folder"])) / str(config["run.name"]))
