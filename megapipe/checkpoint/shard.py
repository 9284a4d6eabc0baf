"""One safetensors file of a checkpoint: written in one pass, read piece by piece.

The file is a plain safetensors file, but its header follows from the manifest: the pieces that the
file holds, in a fixed order. So the reader compares the header's bytes instead of parsing it, and
a piece's position is known before the file is opened. With the pieces' CRC-32, a reader of all
pieces has checked every byte of a shard.
"""

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megapipe.checkpoint.durable import read_into
from megapipe.checkpoint.manifest import Dtype, FileRecord, Manifest
from megapipe.checkpoint.regions import Region
from megapipe.checkpoint.storage import Place, at
from megapipe.errors import CheckpointError

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


class Slot(NamedTuple):
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


def slots_by_file(manifest: Manifest) -> dict[str, list[Slot]]:
    """Each shard's tensors in the order in which they are stored."""
    slots: dict[str, list[Slot]] = {file: [] for file in manifest.files}
    for name, entry in manifest.entries.items():
        for piece in entry.pieces:
            slots[piece.file].append(Slot(name, entry.dtype, piece.region))
    for content in slots.values():
        content.sort(key=lambda slot: slot.order)
    return slots


def header(slots: Iterable[Slot], *, run_id: str, step: int) -> bytes:
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
    path: Place, contents: Sequence[tuple[Slot, Tensor]], *, run_id: str, step: int
) -> tuple[FileRecord, list[int]]:
    """Write tensors, given in `Slot.order`, to a new file and make it durable.

    One tensor at a time is brought to the host; two threads hash it while it is written. Returns
    the file's record and the tensors' CRC-32. Raises CheckpointError if the file cannot be written.
    """

    def fill(file: BinaryIO) -> tuple[FileRecord, list[int]]:
        digest, size, checksums = sha256(), 0, []
        with ThreadPoolExecutor(2) as threads:
            head = header((slot for slot, _ in contents), run_id=run_id, step=step)
            file.write(head)
            digest.update(head)
            size += len(head)
            for _, tensor in contents:
                data = bytes_of(tensor.detach().cpu())
                hashed = threads.submit(digest.update, data)
                crc = threads.submit(zlib.crc32, data)
                for start in range(0, len(data), _BLOCK):
                    file.write(data[start : start + _BLOCK])
                hashed.result()
                checksums.append(crc.result())
                size += len(data)
        return FileRecord(bytes=size, sha256=digest.hexdigest()), checksums

    return at(path).write(fill)


def check_header(path: Place, expected: bytes) -> None:
    """Raise CheckpointError unless the file begins with the header that the manifest implies."""
    found = bytearray(len(expected))
    with at(path).open() as file:
        if not read_into(file, memoryview(found)) or found != expected:
            raise CheckpointError(f"{path} is damaged: its header is not what the manifest says")


def read_tensor(path: Place, start: int, out: Tensor, crc32: int) -> None:
    """Fill the contiguous host tensor `out` with the file's bytes from `start` on.

    Raises CheckpointError if the file ends early or the bytes do not have this CRC-32; `out` is
    then garbage.
    """
    data, crc = bytes_of(out), 0
    with at(path).open() as file:
        file.seek(start)
        for begin in range(0, len(data), _BLOCK):
            block = data[begin : begin + _BLOCK]
            if not read_into(file, block):
                raise CheckpointError(f"{path} ends early")
            crc = zlib.crc32(block, crc)
    if crc != crc32:
        raise CheckpointError(
            f"{path} is damaged: bytes {start} to {start + len(data)} do not match their checksum"
        )


class Examined(NamedTuple):
    """Findings of a reader of a whole shard."""

    sha256: str
    """Of the file's bytes, in hexadecimal."""
    odd: Slot | None
    """The first tensor with a value that is not finite."""


def examine(path: Place, slots: Iterable[Slot], head: int) -> Examined:
    """Read a shard whose `slots` begin after `head` bytes, once; a thread hashes what is read.

    Raises CheckpointError if the file cannot be read or ends early.
    """
    digest, odd = sha256(), None
    buffers = [torch.empty(_BLOCK, dtype=torch.uint8) for _ in range(2)]
    with at(path).open(whole=True) as file, ThreadPoolExecutor(1) as thread:
        hashed: list[Future[None]] = []
        for slot, nbytes in [(None, head), *((slot, slot.nbytes) for slot in slots)]:
            for left in range(nbytes, 0, -_BLOCK):
                if len(hashed) > 1:
                    hashed[-2].result()
                block = buffers[len(hashed) % 2][:left]
                if not read_into(file, bytes_of(block)):
                    raise CheckpointError(f"{path} ends early")
                hashed.append(thread.submit(digest.update, bytes_of(block)))
                if slot is not None and odd is None and not _is_finite(block, slot.dtype):
                    odd = slot
        for each in hashed:
            each.result()
        while rest := file.read(_BLOCK):
            digest.update(rest)
    return Examined(digest.hexdigest(), odd)


def _is_finite(block: Tensor, dtype: Dtype) -> bool:
    """Whether bytes of values are finite numbers, all of them."""
    kind = TORCH_DTYPES[dtype]
    if not kind.is_floating_point:
        return True
    return bool(torch.linalg.vector_norm(block.view(kind), math.inf).isfinite())


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor, shared with it if it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
