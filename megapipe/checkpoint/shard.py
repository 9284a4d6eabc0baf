"""One safetensors file of a checkpoint: written in one pass, read piece by piece.

The file is a plain safetensors file, but its header follows from the manifest: the pieces that the
file holds, in a fixed order. So the reader compares the header's bytes instead of parsing it, and
a piece's position is known before the file is opened. With the pieces' checksums, a reader of all
pieces has checked every byte of a shard.
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
"""Bytes that are read and looked at before more are."""
_IN_ONE_THREAD = 1 << 15
"""Values that torch adds up in one thread where it has several: others read other tensors."""


class ShardTensor(NamedTuple):
    """A tensor of a shard: one region of an entry."""

    name: str
    dtype: Dtype
    region: Region

    @property
    def key(self) -> str:
        """The tensor's name in the file, as in ``model/final_norm.weight@0``."""
        return f"{self.name}@{','.join(map(str, self.region.offsets))}"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.region.numel * TORCH_DTYPES[self.dtype].itemsize

    @property
    def order(self) -> tuple[int, str, Region]:
        """Sort key within a shard: wide types first, so that every tensor is aligned."""
        return -TORCH_DTYPES[self.dtype].itemsize, self.name, self.region


def slots_by_file(manifest: Manifest) -> dict[str, dict[ShardTensor, str]]:
    """Each shard's tensors in the order in which they are stored, with their checksums."""
    found: dict[str, dict[ShardTensor, str]] = {file: {} for file in manifest.files}
    for name, entry in manifest.entries.items():
        for piece in entry.pieces:
            found[piece.file][ShardTensor(name, entry.dtype, piece.region)] = piece.xxh128
    return {
        file: {slot: slots[slot] for slot in sorted(slots, key=lambda slot: slot.order)}
        for file, slots in found.items()
    }


def header(slots: Iterable[ShardTensor], *, run_id: str, step: int) -> bytes:
    """The bytes before the data of a shard that holds `slots`, in this order."""
    tensors = ((x.key, _SAFETENSORS_DTYPES[x.dtype], x.region.sizes, x.nbytes) for x in slots)
    return safetensors_header(tensors, {"run_id": run_id, "step": str(step)})


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes before the data of a safetensors file: of each tensor, in the order of the data,
    its name, its type as the format calls it, its shape and its bytes."""
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
    """Write tensors, given in `ShardTensor.order`, to a new file and make it durable.

    One tensor at a time is brought to the host; a thread hashes it while it is written. Returns
    the file's record and the tensors' checksums. Raises CheckpointError if the file cannot be
    written.
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
    """The 128-bit XXH3 of bytes, in hexadecimal: as fast as memory, and as sure as any digest
    against accidents."""
    return xxhash.xxh3_128_hexdigest(data)


def check_header(path: StorageLocation, expected: bytes) -> None:
    """Raise CheckpointError unless the file begins with the header that the manifest implies."""
    found = bytearray(len(expected))
    with at(path).open() as file:
        if not read_into(file, memoryview(found)) or found != expected:
            raise CheckpointError(f"{path} is damaged: its header is not what the manifest says")


class LocatedTensor(NamedTuple):
    """A tensor of a shard, where its bytes begin, and their checksum."""

    slot: ShardTensor
    start: int
    checksum: str


def read_tensor(path: StorageLocation, stored: LocatedTensor, out: Tensor) -> None:
    """Fill the contiguous host tensor `out` with a tensor of a shard.

    Raises CheckpointError if the file ends early or its bytes have another checksum; `out` is then
    garbage.
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
    """Read tensors that lie one after the other in a shard, once; little of it is held at a time.

    Raises CheckpointError for the first that has another checksum than is known, or with `finite`
    a value that is not finite, or if the file cannot be read or ends early.
    """
    buffer = torch.empty(_IN_CACHE, dtype=torch.uint8)
    most = _IN_ONE_THREAD if torch.get_num_threads() > 1 else len(buffer)  # values, by one call
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
    """The bytes of a host tensor, shared with it if it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
