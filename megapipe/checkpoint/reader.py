"""Reading a checkpoint into any layout, and finding the newest one.

Nothing that a checkpoint says is believed unchecked: the manifest's digest, the proof that its
pieces tile every tensor, the files' kinds and lengths at :meth:`Checkpoint.open`; a shard's
header and the checksum of every piece at each read, on the very bytes that are handed out.
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
"""Of tensors that one thread looks at, one after the other."""
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
        """Check the manifest and the presence and length of every file, or of those in `files`:
        others may then be missing, until they are read.

        Raises CheckpointError, naming the file, if anything is missing, extra, of another kind
        or length, or if the manifest is not valid.
        """
        checkpoint = cls(path, unseal(path / MANIFEST, Manifest))
        checkpoint.check_files(files)
        return checkpoint

    def check_files(self, only: Container[str] | None = None) -> None:
        """Check the presence and length of every file, or of those in `only`; see :meth:`open`."""
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
        """Check the presence and length of these files; returns those of all shards there are."""
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
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def has_state(self) -> bool:
        """Whether it has more than weights, so that a run can go on from it."""
        return any(not name.startswith("model/") for name in self.manifest.entries)

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """The run's configuration by dotted key."""
        return self.manifest.config

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        return sorted(self.manifest.entries)

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that exactly these tensors are there, before any of them is read.

        Entries of other kinds than those asked for (the part of a name before its first slash)
        may be there too. Raises CheckpointError that names the first difference.
        """
        kinds = {name.split("/")[0] for name in shapes}
        stored = {name for name in self.manifest.entries if name.split("/")[0] in kinds}
        if odd := sorted(stored ^ shapes.keys()):
            problem = "has an unexpected" if odd[0] in stored else "lacks the"
            raise CheckpointError(f"{self.path} {problem} entry {odd[0]!r} (of {len(odd)} such)")
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
        """A region of an entry (default: all of it) as a new host tensor of shape `region.sizes`.

        `dtype` may be the stored type or a wider floating-point type; nothing is ever rounded.
        Every piece that the region touches is read whole and its checksum compared. Raises
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
        """Fill the host tensor `out`, of shape `region.sizes`, with a region of an entry, rounded
        where its type is narrower; see :meth:`read`. After an error it holds anything."""
        entry = self._entry(name, region)
        self._fill(out, name, entry, region)

    def _fill(self, out: Tensor, name: str, entry: Entry, region: Region) -> None:
        stored = TORCH_DTYPES[entry.dtype]
        for piece in entry.pieces:
            common = intersect(piece.region, region)
            if common is None:
                continue
            path = self.path / piece.file
            where = self._tensors(piece.file)[ShardTensor(name, entry.dtype, piece.region)]
            target = out[common.inside(region)]
            if common == piece.region and target.dtype == stored and target.is_contiguous():
                read_tensor(path, where, target)
            else:
                data = torch.empty(piece.sizes, dtype=stored)
                read_tensor(path, where, data)
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
        """The files that a read of a region (default: all) touches; none if there is no such
        entry."""
        entry = self.manifest.entries.get(name)
        if entry is None:
            return set()
        read = whole(entry.shape) if region is None else region
        return {piece.file for piece in entry.pieces if intersect(piece.region, read) is not None}

    @classmethod
    def open_sound(
        cls, path: StorageLocation, rank: int = 0, world: int = 1, *, threads: int | None = None
    ) -> "Checkpoint":
        """Open a checkpoint and :meth:`verify` this rank's share of its files, values too, where
        `world` ranks share the work."""
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
        """Compare the length and the header of these files (default: all) and the checksums of all
        their pieces with the manifest, and with `finite` look at every value in them: no training
        could go on from one that is not finite.

        So many `threads` read, by default :func:`readers`. Raises CheckpointError that names a
        damaged file, or an entry with such a value.
        """
        names = list(self.manifest.files if files is None else files)
        self._check_lengths(names)
        for name in names:
            self._placed.pop(name, None)  # what was found sound may not be so any more
        runs = [run for name in names for run in self._runs(name)]
        with ThreadPoolExecutor(threads or readers(self.path)) as pool:
            for _ in pool.map(lambda run: examine(*run, finite=finite), runs):
                pass

    def _header(self, file: str) -> bytes:
        return header(self._slots[file], run_id=self.manifest.run_id, step=self.manifest.step)

    def _tensors(self, file: str) -> Mapping[ShardTensor, LocatedTensor]:
        """The tensors of a file, in the order in which they are stored; checks the file's header
        when they are first asked for."""
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
        """The tensors of a file in runs of about as many bytes each, for threads to share."""
        run: list[LocatedTensor] = []
        for stored in self._tensors(file).values():
            if run and stored.start - run[0].start >= RUN_BYTES:
                yield self.path / file, run
                run = []
            run.append(stored)
        yield self.path / file, run


def readers(path: StorageLocation) -> int:
    """Threads that read a checkpoint: as many as torch computes with, two at least, so that one may
    hash while another waits for the disk, and no more than pay."""
    return min(max(torch.get_num_threads(), 2), at(path).most_readers)


class NewestCheckpoint(NamedTuple):
    """Result of :func:`find_newest`: the folder, and why newer ones were passed over."""

    path: StorageLocation | None
    skipped: list[str]


def find_newest(
    root: StorageLocation, *, skip: Container[StorageLocation] = ()
) -> NewestCheckpoint:
    """Find the newest checkpoint in `root` that opens, by step number and attempt.

    The scan decides; the pointer file and file times do not count. The files' contents are not
    hashed here: if :meth:`Checkpoint.verify` or a read fails later, put the folder in `skip` and
    ask again. Raises StorageError if `root` exists but cannot be listed, or a manifest cannot be
    read: what the store does not answer for is not damaged.
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
