"""Saves of checkpoints: a kill or a power cut at any moment leaves the previous checkpoint.

1. Rank 0 makes a staging folder whose name no other attempt shares.
2. Every rank writes its pieces there into shard files of bounded size, then a receipt that lists
   the pieces with their checksums. All of these files are fsynced.
3. Rank 0 merges the receipts, proves that the pieces tile every entry, writes the manifest,
   fsyncs the folder and opens the result as a reader would.
4. One rename makes the folder a checkpoint; after the parent folder's fsync it is durable.
5. Only then the `latest` pointer is replaced.

After each phase the ranks agree on whether any rank failed, so all ranks raise and none hangs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeVar

from pydantic import JsonValue, ValidationError
from torch import Tensor

from megapipe.checkpoint.folders import next_name
from megapipe.checkpoint.manifest import (
    Dtype,
    Entry,
    FileRecord,
    Manifest,
    Receipt,
    StoredPiece,
    build_manifest,
    first_problem,
    seal,
    unseal,
)
from megapipe.checkpoint.names import MANIFEST, POINTER
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.shard import TORCH_DTYPES, ShardTensor, write_shard
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError, MegapipeError

SHARD_BYTES = 2 << 30
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """One rank's part of the global tensor `name` of shape `shape`: the elements of `region`.

    `tensor` has the shape `region.sizes` and any device; its dtype is fp32, bf16, fp64 or int64.
    Over all ranks, each element is in exactly one piece: only the primary passes it.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor


@dataclass(frozen=True)
class Meta:
    """Values about the run that a checkpoint records; only rank 0's values are written.

    `digests` are SHA-256 of the data that the run read (corpus, tokenizer), in hexadecimal.
    """

    run_id: str
    layout: Mapping[str, JsonValue]
    coordinates: Mapping[str, JsonValue]
    config: Mapping[str, JsonValue]
    digests: Mapping[str, str] = field(default_factory=dict)


class SaveGroup(Protocol):
    """The ranks that save together. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Index of this process, from 0 to `world` - 1."""

    @property
    def world(self) -> int:
        """Number of processes."""

    def share(self, text: str) -> str:
        """Return the text of rank 0 on every rank."""

    def agree(self, error: str | None) -> str | None:
        """Return the error of one failing rank, the same on every rank; None if all passed None.

        Returns only after every rank has called this method.
        """


class SingleProcess:
    """The group of a single process."""

    rank = 0
    world = 1

    def share(self, text: str) -> str:
        """Return the text itself."""
        return text

    def agree(self, error: str | None) -> str | None:
        """Return the error itself."""
        return error


def save(
    root: StorageLocation,
    *,
    step: int,
    pieces: Iterable[Piece],
    meta: Meta,
    group: SaveGroup,
    nbytes: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> StorageLocation:
    """Write a checkpoint of all ranks' pieces and commit it; returns its folder on every rank.

    `root` must be on a file system that all ranks share. `pieces` may be a generator that does not
    communicate; at most `shard_bytes` of its pieces (or one larger piece) are held at a time. If
    the disk has less free space than `nbytes`, the save fails before it writes anything. The folder
    is ``step-<step>``, with a suffix if that name was used: no folder is ever overwritten.

    Raises CheckpointError on every rank if any rank cannot write, or if the pieces do not tile
    every entry exactly; the staging folder is then removed, and earlier checkpoints are unchanged.
    Any other exception is re-raised on the rank where it arose.
    """
    lead = group.rank == 0
    staging = stage(root, step, group, nbytes)
    try:
        run_on_all(group, lambda: write(staging, step, pieces, meta, group.rank, shard_bytes))
        name = run_on_all(group, lambda: commit(staging, step, meta, group.world) if lead else "")
    except Exception:
        if lead:
            discard(staging)
        raise
    return root / group.share(name)


def stage(root: StorageLocation, step: int, group: SaveGroup, nbytes: int) -> StorageLocation:
    """Make a staging folder for a checkpoint of `step`; return its path on every rank.

    Raises CheckpointError on all ranks if rank 0 fails, or the disk has less than `nbytes` bytes of
    free space.
    """
    lead = group.rank == 0
    name = run_on_all(group, lambda: _make_staging(root, step, nbytes) if lead else "")
    return root / group.share(name)


def discard(staging: StorageLocation) -> None:
    """Remove the staging folder of a failed save."""
    at(staging).discard()


def run_on_all(group: SaveGroup, work: Callable[[], T]) -> T:
    """Run `work`, this rank's part of a phase; raise on every rank if it failed on any rank."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    fault = group.agree(None if error is None else f"rank {group.rank}: {described(error)}")
    if error is not None and not isinstance(error, CheckpointError | OSError):
        raise error
    if fault is not None:
        raise not_saved(fault) from error
    return result


def not_saved(fault: str) -> CheckpointError:
    """Make the error of a save that failed on some rank."""
    return CheckpointError(f"checkpoint not saved: {fault}")


def described(error: Exception) -> str:
    """Format an error on one line."""
    if isinstance(error, MegapipeError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _make_staging(root: StorageLocation, step: int, nbytes: int) -> str:
    return at(root).stage(step, nbytes, lambda: next_name(root, step))


@dataclass
class _Batch:
    """Pieces that go into one shard file."""

    contents: list[tuple[ShardTensor, Tensor]] = field(default_factory=list)
    nbytes: int = 0


def write(
    staging: StorageLocation,
    step: int,
    pieces: Iterable[Piece],
    meta: Meta,
    rank: int,
    shard_bytes: int,
    *,
    weights_apart: bool = False,
) -> None:
    """Write one rank's shard files and its receipt. With `weights_apart` no file mixes weights with
    other state. Raises CheckpointError or OSError."""
    if not at(staging).sees_attempt():
        raise CheckpointError(
            f"{staging} of rank 0 is not visible on this rank: is the folder on a shared disk?"
        )
    kinds: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
    stored: dict[str, list[StoredPiece]] = {}
    files: dict[str, FileRecord] = {}
    weights, states = _Batch(), _Batch()

    def flush(batch: _Batch) -> None:
        file, contents = f"{rank:05d}-{len(files):04d}.safetensors", batch.contents
        contents.sort(key=lambda item: item[0].order)
        files[file], checksums = write_shard(
            staging / file, contents, run_id=meta.run_id, step=step
        )
        for (slot, _), checksum in zip(contents, checksums, strict=True):
            offsets, sizes = slot.region
            stored[slot.name].append(
                StoredPiece(file=file, offsets=offsets, sizes=sizes, xxh128=checksum)
            )
        contents.clear()
        batch.nbytes = 0

    try:
        for piece in pieces:
            slot = _slot(piece)
            kind = (slot.dtype, tuple(piece.shape))
            if kinds.setdefault(piece.name, kind) != kind:
                raise CheckpointError(f"entry {piece.name!r} has two shapes or types")
            stored.setdefault(piece.name, [])
            if not slot.nbytes:
                continue
            of_states = weights_apart and not slot.name.startswith("model/")
            batch = states if of_states else weights
            if batch.contents and batch.nbytes + slot.nbytes > shard_bytes:
                flush(batch)
            batch.contents.append((slot, piece.tensor))
            batch.nbytes += slot.nbytes
        for batch in (weights, states):
            if batch.contents:
                flush(batch)
        receipt = Receipt(
            run_id=meta.run_id,
            step=step,
            rank=rank,
            entries={
                name: Entry(dtype=dtype, shape=shape, pieces=tuple(stored[name]))
                for name, (dtype, shape) in kinds.items()
            },
            files=files,
        )
    except ValidationError as error:
        raise CheckpointError(first_problem(error)) from None
    _write_sealed(receipt_path(staging, rank), receipt)
    at(staging).sync()


def _slot(piece: Piece) -> ShardTensor:
    dtype = _DTYPE_NAMES.get(piece.tensor.dtype)
    if dtype is None:
        raise CheckpointError(
            f"entry {piece.name!r} is {piece.tensor.dtype}, not one of {', '.join(TORCH_DTYPES)}"
        )
    if tuple(piece.tensor.shape) != piece.region.sizes or not piece.region.fits(piece.shape):
        raise CheckpointError(
            f"entry {piece.name!r} of shape {list(piece.shape)}: a tensor of shape "
            f"{list(piece.tensor.shape)} is not {piece.region}"
        )
    return ShardTensor(piece.name, dtype, piece.region)


def commit(staging: StorageLocation, step: int, meta: Meta, world: int) -> str:
    """Turn a complete staging folder into a checkpoint: manifest, rename, pointer.

    Called on rank 0 only. Returns the new folder's name; raises CheckpointError or OSError.
    """
    root = staging.parent
    manifest = build_manifest(
        run_id=meta.run_id,
        step=step,
        layout=meta.layout,
        coordinates=meta.coordinates,
        config=meta.config,
        digests=meta.digests,
        receipts=[unseal(receipt_path(staging, rank), Receipt) for rank in range(world)],
    )
    Checkpoint(staging, manifest).check_files()
    for rank in range(world):
        at(receipt_path(staging, rank)).unlink()
    _write_sealed(staging / MANIFEST, manifest)
    at(staging).sync()
    unseal(staging / MANIFEST, Manifest)  # as a reader would
    name = at(staging).publish(lambda: next_name(root, step))
    point_at(root, name)
    return name


def point_at(root: StorageLocation, name: str) -> None:
    """Write the checkpoint's name into the pointer file `latest` of `root`. Raises CheckpointError
    or OSError."""
    at(root / POINTER).replace(f"{name}\n".encode())


def _write_sealed(path: StorageLocation, record: Manifest | Receipt) -> None:
    data = seal(record)

    def fill(file: BinaryIO) -> None:
        file.write(data)

    at(path).write(fill)


def receipt_path(staging: StorageLocation, rank: int) -> StorageLocation:
    """Return the path of the receipt in which a rank lists the files that it wrote."""
    return staging / f"receipt-{rank:05d}.json"
