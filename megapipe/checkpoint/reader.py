"""Reading a checkpoint into any layout, and finding the newest one.

All content of a checkpoint is checked. :meth:`Checkpoint.open` checks the manifest's digest, proves
that the pieces tile every tensor, and checks the files' kinds and lengths. A read checks the file's
header and computes each piece's checksum from the very bytes that it returns.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.manifest import Entry, Manifest, unseal
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.regions import Region, intersect, whole
from megapipe.checkpoint.shard import (
    TORCH_DTYPES,
    LocatedTensor,
    ShardTensor,
    check_header,
    examine,
    header,
    read_tensor,
    slots_by_file,
)
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError, StorageError

RUN_BYTES = 1 << 26
"""Approximate bytes of consecutive tensors that one thread verifies at a time."""
_WIDER = {
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
    torch.int64: (torch.int64,),
}


class Checkpoint:
    """An opened checkpoint folder. Make one with :meth:`open`."""

    def __init__(self, path: StorageLocation, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._slots = slots_by_file(manifest)
        self._placed: dict[str, dict[ShardTensor, LocatedTensor]] = {}

    @classmethod
    def open(cls, path: StorageLocation, files: Container[str] | None = None) -> "Checkpoint":
        """Open a checkpoint: check its manifest, and the presence and length of its files. With
        `files` only these files are checked, and the others may be missing until they are read.

        Raises CheckpointError, naming the file, if a file is missing, not in the manifest, not an
        ordinary file, or of another length, or if the manifest is not valid.
        """
        checkpoint = cls(path, unseal(path / MANIFEST, Manifest))
        checkpoint.check_files(files)
        return checkpoint

    def check_files(self, only: Container[str] | None = None) -> None:
        """Check that the files, or only the files `only`, have the lengths that the manifest
        records, and that there are no other shard files. Raises CheckpointError."""
        files = self.manifest.files
        for name, slots in self._slots.items():
            recorded = files[name].bytes
            implied = len(self._header(name)) + sum(slot.nbytes for slot in slots)
            if implied != recorded:
                raise CheckpointError(
                    f"{self.path / MANIFEST} gives {name} {recorded} bytes, its pieces need "
                    f"{implied}"
                )
        found = self._check_lengths([each for each in files if only is None or each in only])
        if extra := found.keys() - files.keys():
            raise CheckpointError(f"{self.path / min(extra)} is not in the manifest")

    def _check_lengths(self, names: Sequence[str]) -> Mapping[str, int]:
        """Check that the files `names` exist with the recorded lengths. Return the lengths of all
        shard files in the folder."""
        found = at(self.path).sizes(names, ".safetensors")
        for name in names:
            recorded = self.manifest.files[name].bytes
            if found[name] != recorded:
                raise CheckpointError(
                    f"{self.path / name} has {found[name]} bytes, should have {recorded}"
                )
        return found

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint."""
        return self.manifest.step

    @property
    def has_state(self) -> bool:
        """Whether the checkpoint has more than weights, so that a run can resume from it."""
        return any(not name.startswith("model/") for name in self.manifest.entries)

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Configuration of the run, by dotted key."""
        return self.manifest.config

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        return sorted(self.manifest.entries)

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the checkpoint has exactly these tensors, before any of them is read.

        The kind of an entry is its name up to the first slash, such as ``model``. Entries whose
        kind does not occur in `shapes` are ignored. Raises CheckpointError that names the first
        difference.
        """
        kinds = {name.split("/")[0] for name in shapes}
        stored = {name for name in self.manifest.entries if name.split("/")[0] in kinds}
        if odd := sorted(stored ^ shapes.keys()):
            problem = "has an unexpected" if odd[0] in stored else "lacks the"
            raise CheckpointError(
                f"{self.path} {problem} entry {odd[0]!r} ({len(odd)} names differ in total)"
            )
        for name, shape in shapes.items():
            found = self.manifest.entries[name].shape
            if found != tuple(shape):
                raise CheckpointError(
                    f"{self.path}: entry {name!r} has shape {list(found)}, "
                    f"the model's has {list(shape)}"
                )

    def read(
        self, name: str, region: Region | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read a region of an entry (default: all of it) as a new host tensor of shape
        `region.sizes`.

        `dtype` may be the stored type or a wider floating-point type; nothing is ever rounded.
        Pieces that overlap with the region are read in full and their checksums compared. Raises
        CheckpointError for an unknown entry, a region outside it, another dtype, or damage.
        """
        entry = self._entry(name, region)
        region = whole(entry.shape) if region is None else region
        stored = TORCH_DTYPES[entry.dtype]
        if dtype is not None and dtype not in _WIDER[stored]:
            raise CheckpointError(f"{self.path}: {name!r} is {stored}, cannot be read as {dtype}")
        out = torch.empty(region.sizes, dtype=stored)
        self._fill(out, name, entry, region)
        return out if dtype is None else out.to(dtype)

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill the host tensor `out`, of shape `region.sizes`, with a region of an entry. Values
        are rounded if `out` has a narrower type. Raises CheckpointError for an unknown entry, a
        region outside it, or damage; the values of `out` are then undefined."""
        entry = self._entry(name, region)
        self._fill(out, name, entry, region)

    def _fill(self, out: Tensor, name: str, entry: Entry, region: Region) -> None:
        stored = TORCH_DTYPES[entry.dtype]
        for piece in entry.pieces:
            common = intersect(piece.region, region)
            if common is None:
                continue
            path = self.path / piece.file
            located = self._tensors(piece.file)[ShardTensor(name, entry.dtype, piece.region)]
            target = out[common.inside(region)]
            if common == piece.region and target.dtype == stored and target.is_contiguous():
                read_tensor(path, located, target)
            else:
                data = torch.empty(piece.sizes, dtype=stored)
                read_tensor(path, located, data)
                target.copy_(data[common.inside(piece.region)])

    def _entry(self, name: str, region: Region | None) -> Entry:
        entry = self.manifest.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no entry {name!r}")
        if region is not None and not region.fits(entry.shape):
            raise CheckpointError(
                f"{self.path}: {name!r} has shape {list(entry.shape)}, not {region}"
            )
        return entry

    def files_with(self, name: str, region: Region | None = None) -> set[str]:
        """Return the names of the shard files that hold a region of an entry (default: all of it);
        an empty set for an unknown entry."""
        entry = self.manifest.entries.get(name)
        if entry is None:
            return set()
        read = whole(entry.shape) if region is None else region
        return {piece.file for piece in entry.pieces if intersect(piece.region, read) is not None}

    @classmethod
    def open_sound(
        cls, path: StorageLocation, rank: int = 0, world: int = 1, *, threads: int | None = None
    ) -> "Checkpoint":
        """Open a checkpoint, and check with :meth:`verify` that the files are intact and all values
        finite. Rank `rank` of `world` ranks checks every `world`-th file."""
        checkpoint = cls.open(path)
        files = sorted(checkpoint.manifest.files)
        checkpoint.verify(files[rank::world], finite=True, threads=threads)
        return checkpoint

    def verify(
        self,
        files: Iterable[str] | None = None,
        *,
        finite: bool = False,
        threads: int | None = None,
    ) -> None:
        """Compare `files` (default: all) with the manifest: lengths, headers, and the checksums of
        all pieces. With `finite` also check that every value is finite, as training can only resume
        from finite values.

        Uses `threads` threads, by default :func:`readers`. Raises CheckpointError that names a
        damaged file, or an entry with a value that is not finite.
        """
        names = list(self.manifest.files if files is None else files)
        self._check_lengths(names)
        for name in names:
            self._placed.pop(name, None)  # the file may have been damaged since its last check
        runs = [run for name in names for run in self._runs(name)]
        with ThreadPoolExecutor(threads or readers(self.path)) as pool:
            for _ in pool.map(lambda run: examine(*run, finite=finite), runs):
                pass

    def _header(self, file: str) -> bytes:
        return header(self._slots[file], run_id=self.manifest.run_id, step=self.manifest.step)

    def _tensors(self, file: str) -> Mapping[ShardTensor, LocatedTensor]:
        """Return the tensors of a file in stored order; the first call for it checks its header."""
        if file not in self._placed:
            head, slots = self._header(file), self._slots[file]
            check_header(self.path / file, head)
            starts = accumulate((slot.nbytes for slot in slots), initial=len(head))
            self._placed[file] = {
                slot: LocatedTensor(slot, start, wanted)
                for (slot, wanted), start in zip(slots.items(), starts, strict=False)
            }
        return self._placed[file]

    def _runs(self, file: str) -> Iterator[tuple[StorageLocation, list[LocatedTensor]]]:
        """Split the tensors of a file into consecutive groups of about equal size, for threads."""
        run: list[LocatedTensor] = []
        for stored in self._tensors(file).values():
            if run and stored.start - run[0].start >= RUN_BYTES:
                yield self.path / file, run
                run = []
            run.append(stored)
        yield self.path / file, run


def readers(path: StorageLocation) -> int:
    """Return the number of threads that read a checkpoint: torch's number of threads, at least two
    (one can hash while another waits for the disk), and at most the storage's `most_readers`."""
    return min(max(torch.get_num_threads(), 2), at(path).most_readers)


class NewestCheckpoint(NamedTuple):
    """The newest usable checkpoint of a folder."""

    path: StorageLocation | None
    """Folder of the checkpoint; None if there is none."""
    skipped: list[str]
    """Texts that say why newer checkpoints were skipped, one each."""


def find_newest(
    root: StorageLocation, *, skip: Container[StorageLocation] = ()
) -> NewestCheckpoint:
    """Find the newest checkpoint in `root` that opens, by step and attempt.

    The pointer file ``latest`` and file times are ignored, and the contents of shard files are not
    hashed. If :meth:`Checkpoint.verify` or a read fails later, call this function again with the
    folder in `skip`. Raises StorageError if `root` exists but cannot be listed, or if a manifest
    cannot be read: such a checkpoint may be intact.
    """
    skipped: list[str] = []
    for key in committed(root):
        path = root / key.name
        if path in skip:
            continue
        try:
            step = Checkpoint.open(path).step
        except StorageError:
            raise
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if step == key.step:
            return NewestCheckpoint(path, skipped)
        skipped.append(f"{path} holds step {step}")
    return NewestCheckpoint(None, skipped)
