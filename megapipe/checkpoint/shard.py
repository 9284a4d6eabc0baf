"""A shard file of a checkpoint: written in one pass, read piece by piece.

The file is a plain safetensors file, but the manifest determines its header: it lists the file's
pieces in a fixed order. So the reader compares the header's bytes instead of parsing them, and
knows where a piece is before it opens the file. As each piece has a checksum, a reader of all
pieces has checked every byte of the file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from megapipe.checkpoint.durable import read_into
from megapipe.checkpoint.manifest import Dtype, FileRecord, Manifest
from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError
from megapipe.util.finite import all_finite

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "int64": torch.int64,
}
_SAFETENSORS_DTYPES: dict[Dtype, str] = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp64": "F64",
    "int64": "I64",
}
_BLOCK = 1 << 24
_IN_CACHE = 1 << 20
"""Number of bytes that are read at a time, so that they are checked while in the CPU cache."""
_IN_ONE_THREAD = 1 << 15
"""Maximum number of values that torch checks for finite values in the calling thread alone. Threads
of torch would compete with the other threads that verify tensors."""


class ShardTensor(NamedTuple):
    """One tensor of a shard file: a region of a global tensor of the checkpoint."""

    name: str
    dtype: Dtype
    region: Region

    @property
    def key(self) -> str:
        """Name of the tensor in the file, such as ``model/final_norm.weight@0``."""
        return f"{self.name}@{','.join(map(str, self.region.offsets))}"

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.region.numel * TORCH_DTYPES[self.dtype].itemsize

    @property
    def order(self) -> tuple[int, str, Region]:
        """Sort key for a shard file: wide types come first, so that every tensor is aligned."""
        return -TORCH_DTYPES[self.dtype].itemsize, self.name, self.region


def slots_by_file(manifest: Manifest) -> dict[str, dict[ShardTensor, str]]:
    """Return the tensors of each shard file in stored order, with their checksums."""
    found: dict[str, dict[ShardTensor, str]] = {file: {} for file in manifest.files}
    for name, entry in manifest.entries.items():
        for piece in entry.pieces:
            found[piece.file][ShardTensor(name, entry.dtype, piece.region)] = piece.xxh128
    return {
        file: {slot: slots[slot] for slot in sorted(slots, key=lambda slot: slot.order)}
        for file, slots in found.items()
    }


def header(slots: Iterable[ShardTensor], *, run_id: str, step: int) -> bytes:
    """Return the header bytes of a shard file with the tensors `slots`, in this order."""
    tensors = ((x.key, _SAFETENSORS_DTYPES[x.dtype], x.region.sizes, x.nbytes) for x in slots)
    return safetensors_header(tensors, {"run_id": run_id, "step": str(step)})


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header bytes of a safetensors file. `tensors`, in the order of the data, are
    tuples of name, safetensors type, shape and number of bytes."""
    content: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, dtype, shape, nbytes in tensors:
        end = start + nbytes
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: StorageLocation, contents: Sequence[tuple[ShardTensor, Tensor]], *, run_id: str, step: int
) -> tuple[FileRecord, list[str]]:
    """Write tensors, sorted by `ShardTensor.order`, to a new file and make it durable.

    One tensor at a time is copied to the host; a thread hashes it while it is written. Returns the
    file's record and the tensors' checksums. Raises CheckpointError if the file cannot be written.
    """

    def fill(file: BinaryIO) -> tuple[FileRecord, list[str]]:
        head = header((slot for slot, _ in contents), run_id=run_id, step=step)
        size, checksums = len(head), []
        file.write(head)
        with ThreadPoolExecutor(1) as thread:
            for _, tensor in contents:
                data = bytes_of(tensor.detach().cpu())
                hashed = thread.submit(checksum, data)
                for start in range(0, len(data), _BLOCK):
                    file.write(data[start : start + _BLOCK])
                checksums.append(hashed.result())
                size += len(data)
        return FileRecord(bytes=size), checksums

    return at(path).write(fill)


def checksum(data: memoryview) -> str:
    """Return the 128-bit XXH3 of `data`, in hexadecimal. It is as fast as memory, and detects
    accidents as reliably as any digest."""
    return xxhash.xxh3_128_hexdigest(data)


def check_header(path: StorageLocation, expected: bytes) -> None:
    """Raise CheckpointError unless the file begins with the header that the manifest implies."""
    found = bytearray(len(expected))
    with at(path).open() as file:
        if not read_into(file, memoryview(found)) or found != expected:
            raise CheckpointError(f"{path} is damaged: its header is not what the manifest says")


class LocatedTensor(NamedTuple):
    """A tensor of a shard file, the byte where it begins, and its checksum."""

    slot: ShardTensor
    start: int
    checksum: str


def read_tensor(path: StorageLocation, stored: LocatedTensor, out: Tensor) -> None:
    """Fill the contiguous host tensor `out` with the tensor `stored` of a shard file.

    Raises CheckpointError if the file ends early or the checksum of the bytes differs; the values
    of `out` are then undefined.
    """
    data, hashed = bytes_of(out), xxhash.xxh3_128()
    with at(path).open(until=stored.start + len(data)) as file:
        file.seek(stored.start)
        for begin in range(0, len(data), _IN_CACHE):
            block = data[begin : begin + _IN_CACHE]
            if not read_into(file, block):
                raise CheckpointError(f"{path} ends early")
            hashed.update(block)
    if hashed.hexdigest() != stored.checksum:
        raise _damaged(path, stored)


def examine(path: StorageLocation, tensors: Sequence[LocatedTensor], *, finite: bool) -> None:
    """Read consecutive tensors of a shard file once, in small blocks, and check them.

    Raises CheckpointError for the first tensor with a wrong checksum or, with `finite`, with a
    value that is not finite. Raises it too if the file cannot be read or ends early.
    """
    buffer = torch.empty(_IN_CACHE, dtype=torch.uint8)
    most = _IN_ONE_THREAD if torch.get_num_threads() > 1 else len(buffer)  # values per call
    last = tensors[-1]
    with at(path).open(until=last.start + last.slot.nbytes) as file:
        file.seek(tensors[0].start)
        for stored in tensors:
            slot, hashed, sound = stored.slot, xxhash.xxh3_128(), True
            kind = TORCH_DTYPES[slot.dtype]
            for left in range(slot.nbytes, 0, -_IN_CACHE):
                block = buffer[:left]
                if not read_into(file, bytes_of(block)):
                    raise CheckpointError(f"{path} ends early")
                hashed.update(bytes_of(block))
                if finite and sound and kind.is_floating_point:
                    sound = all(map(all_finite, block.view(kind).split(most)))
            if hashed.hexdigest() != stored.checksum:
                raise _damaged(path, stored)
            if not sound:
                raise CheckpointError(
                    f"{path.parent}: entry {slot.name!r} has values that are not finite"
                )


def _damaged(path: StorageLocation, stored: LocatedTensor) -> CheckpointError:
    stop = stored.start + stored.slot.nbytes
    return CheckpointError(
        f"{path} is damaged: bytes {stored.start} to {stop} do not match their checksum"
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a host tensor; they share memory with a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
