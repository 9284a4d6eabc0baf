"""In-memory checkpoints: state in the nodes' memory, for a restart after ranks have died.

A lost rank costs the steps since the last checkpoint, and in-memory checkpoints are cheap (Wang et
al., Gemini, SOSP 2023). At a step boundary every rank writes its part of a checkpoint into a folder
in its node's memory. The launcher has made the folder, which outlives the ranks. With several nodes
each node then sends its files to the next node, so that a lost node takes only one of two copies.
For this exchange the first ranks of all nodes form a group, the second ranks another group, and so
on.

At the next start the nodes exchange lists of what they have. Receipts and checksums show which
checkpoint is complete, wherever its parts are. A node then gets the files that its ranks lack.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from megapipe.checkpoint.manifest import Manifest, Receipt
from megapipe.checkpoint.node_folder import (
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
    """The in-memory checkpoints of one run, on this node in `folder`. All methods are
    collective."""

    def __init__(self, folder: Path, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._folder = NodeFolder(folder)
        name = hashlib.sha256(f"{machine()} {folder}".encode()).digest()
        self.nodes = Nodes.on(mesh, int.from_bytes(name[:7], "big"))
        self._node = self.nodes.of_rank[mesh.rank]
        self._index = self.nodes.local_index(mesh.rank)
        self._leads = self._index == 0
        self._lane = cross_node_axis(mesh, self.nodes)
        self._nodes_with: dict[str, list[int]] = {}
        """Nodes that have each file of the chosen checkpoint, by file name; complete on rank 0."""
        self._brought: list[Path] = []
        """Files of the chosen checkpoint that this rank has received."""
        self._on_each_node(lambda: folder.mkdir(mode=0o700, exist_ok=True))

    def check_room(self, parts: Sequence[int]) -> int:
        """Return the most bytes that in-memory checkpoints can take on this node, if rank i writes
        `parts[i]` bytes. Raises CheckpointError on all ranks if a node has too little memory."""
        kept = {self._node, self.nodes.backup_source(self._node)}
        need = COPIES_KEPT * sum(parts[rank] for node in kept for rank in self.nodes.ranks(node))

        def look() -> None:
            root = self._folder.root
            used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            free = shutil.disk_usage(root).free + used
            if free < need:
                raise CheckpointError(
                    f"{root.parent} has {free / 1e9:.3g} GB free, and "
                    f"checkpoint.in_memory_every takes {need / 1e9:.3g} GB for {COPIES_KEPT} "
                    "copies of the state: enlarge it (--shm-size in a container), or set "
                    "checkpoint.in_memory_every=0"
                )

        self._on_each_node(look)
        return need

    def _on_each_node(self, work: Callable[[], object]) -> None:
        """Call `work` on one rank of each node; raise CheckpointError on all ranks if it fails."""
        error = None
        try:
            if self._leads:
                work()
        except (CheckpointError, OSError) as problem:
            error = CheckpointError(described(problem))
        raise_on_all(self._mesh, error)

    def save(self, content: SaveArguments) -> None:
        """Save the state. Raises CheckpointError on all ranks if a rank fails; earlier in-memory
        checkpoints are then unchanged."""
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
        arguments = (content.step, content.pieces, content.meta, rank, SHARD_BYTES)
        write(staging, *arguments, weights_apart=True)

    def _send(self, generation: MemoryCheckpointName) -> None:
        """Send this rank's files to the next node, and also the files of local ranks that have no
        partner there."""
        if self._lane.group is None:
            return
        staging, nodes = self._folder.staging(generation), self.nodes
        own = nodes.ranks(self._node)[self._index :: nodes.lanes]
        after = next(node for node in range(nodes.count) if nodes.backup_source(node) == self._node)
        files = [path for rank in own for path in files_of(staging, rank)]
        exchange_files(self._lane, {self._member(after): files}, staging)

    def _member(self, node: int) -> int:
        """Return the index, in this rank's cross-node group, of the member on `node`."""
        return next(
            i for i, rank in enumerate(self._lane.ranks) if self.nodes.of_rank[rank] == node
        )

    def forget(self, after: int) -> None:
        """Remove in-memory checkpoints of more than `after` steps, which are obsolete; -1: all."""
        self._on_each_node(lambda: self._folder.keep(lambda each: each.step <= after))

    def newest(
        self, run: str, above: int, below: int | None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Find the newest checkpoint of more than `above` and less than `below` steps that is
        complete, intact and finite. Returns also a line for each skipped checkpoint and damaged
        file.

        `run` is the run's folder and name, as in the configuration. Files that the node lacks must
        be fetched (:meth:`fetch`) before they are read.
        """
        reasons: list[str] = []
        own = [each.name for each in self._folder.generations()] if self._leads else []
        names = {name for text in self._gather(json.dumps(own)) for name in json.loads(text)}
        text = self._mesh.share(json.dumps(sorted(names, reverse=True)))  # names begin with steps
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
        """Return the checkpoint if it is complete, else None; add its problems to `reasons`."""
        folder, mesh = self._folder.path(generation), self._mesh
        texts = self._gather(_records_of(folder) if self._leads else "{}")
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
        self._nodes_with = {}
        for rank, names in enumerate(having):
            for name in json.loads(names):
                self._nodes_with.setdefault(name, []).append(self.nodes.of_rank[rank])
        lost = min(manifest.files.keys() - self._nodes_with.keys(), default=None)
        missing = f"{folder / str(lost)} is not on any node" if mesh.rank == 0 and lost else None
        if (missing := mesh.agree(missing)) is not None:
            reasons.append(missing)
            return None
        return Checkpoint.open(folder, here)

    def _remove_damaged(self, checkpoint: Checkpoint) -> str | None:
        """Remove this node's files that are damaged or have values that are not finite; each rank
        checks some of the files. Returns the problem of one removed file, or None."""
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
        """Whether `checkpoint` is one of these in-memory checkpoints."""
        return checkpoint.path == self._at(checkpoint)

    def _at(self, checkpoint: Checkpoint) -> Path:
        return self._folder.root / checkpoint.path.name

    def fetch(self, checkpoint: Checkpoint, needed: set[str]) -> None:
        """Receive those files `needed` by this rank that its node lacks. `checkpoint` is a result
        of :meth:`newest`.

        Raises LaunchError on all ranks if that fails; the checkpoint is then removed.
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
                f"the in-memory checkpoint of step {checkpoint.step} cannot be sent to all "
                f"nodes: {problem}; the next start uses an older checkpoint"
            )

    def _moves(self, wanted: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return (file, source node, target node) of the files to send. `wanted`: for each rank, a
        JSON list of the names of the files that its node lacks."""
        pairs = {
            (name, self.nodes.of_rank[rank])
            for rank, names in enumerate(wanted)
            for name in json.loads(names)
        }
        return [
            (name, self._nodes_with[name][number % len(self._nodes_with[name])], node)
            for number, (name, node) in enumerate(sorted(pairs))
        ]

    def release(self) -> None:
        """Remove the files that this rank has received and read."""
        for path in self._brought:
            path.unlink(missing_ok=True)
        self._brought = []

    def _gather(self, text: str) -> list[str]:
        """Return the texts of all ranks on rank 0, and of only some ranks on other ranks."""
        texts = [text]
        for axis in reversed(AXES):
            rows = self._mesh.gather(json.dumps(texts), axis)
            texts = [each for row in rows for each in json.loads(row)]
        return texts


def memory_copies(
    config: Config, folder: Path | None, mesh: ParallelMesh
) -> MemoryCheckpoints | None:
    """Return a run's in-memory checkpoints in the launcher's `folder`; None if they are not used.

    Raises :class:`ConfigError` on all ranks if they are used but the launcher has made no folder.
    """
    every, error = config.checkpoint.in_memory_every, None
    if every and folder is None:
        error = ConfigError(
            f"checkpoint.in_memory_every={every} needs a folder in memory, which the launcher "
            "makes: expected megapipe launch --max-restarts N and a writable /dev/shm, or "
            "checkpoint.in_memory_every=0"
        )
    raise_on_all(mesh, error)
    if folder is None:
        return None
    if not every:  # an earlier start may have had another configuration
        NodeFolder(folder).keep(lambda _: False)
        return None
    return MemoryCheckpoints(folder, mesh)


def _records_of(folder: Path) -> str:
    """Return this node's partial manifest and receipts of an in-memory checkpoint, as JSON."""
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
    """Merge the nodes' partial manifests and receipts into a manifest. Raises CheckpointError."""
    records = [json.loads(text) for text in texts]
    facts = [
        PartialManifest.model_validate_json(each["facts"]) for each in records if each.get("facts")
    ]
    if not facts:
        raise CheckpointError("no node has its facts")
    if run != run_of(facts[0].config):
        raise CheckpointError("it belongs to another run")
    found = [
        Receipt.model_validate_json(text) for each in records for text in each.get("receipts", [])
    ]
    return facts[0].manifest(list({receipt.rank: receipt for receipt in found}.values()))


def run_of(config: Mapping[str, JsonValue]) -> str:
    """Return the path of a run's folder from its configuration: ``run.folder`` / ``run.name``."""
    return str(Path(str(config["run.folder"])) / str(config["run.name"]))
