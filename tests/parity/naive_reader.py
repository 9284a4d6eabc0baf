"""A reader of checkpoints that shares no code with the package: only json, struct and numpy.

A checkpoint is a folder with `manifest.json` and shards. The manifest is ``{"body": BODY, ...}``;
``BODY["entries"]`` has for each global tensor its type, its shape, and its pieces, each a rectangle
(`offsets`, `sizes`) in a `file`. A shard is a safetensors file: the length of its header as eight
bytes, the header as JSON, the values. In the header a piece is called ``ENTRY@OFFSET,OFFSET``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BITS = {"fp32": np.uint32, "bf16": np.uint16, "fp64": np.uint64, "int64": np.uint64}
CALLED = {"fp32": "F32", "bf16": "BF16", "fp64": "F64", "int64": "I64"}

Array = np.ndarray[Any, np.dtype[Any]]


class Global(NamedTuple):
    """A whole tensor: the bits of its values, [*shape], in the type `dtype`."""

    dtype: str
    bits: Array


class Malformed(AssertionError):
    """Raised if a folder is not a whole checkpoint."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the body of the manifest."""
    return json.loads((folder / "manifest.json").read_bytes())["body"]


def read_global(folder: Path) -> dict[str, Global]:
    """Return all global tensors by entry.

    Raises :class:`Malformed` unless each element of each is written exactly once, and the shard
    files hold what the manifest lists and nothing else.
    """
    manifest = read_manifest(folder)
    shards = {file: _tensors(folder / file) for file in manifest["files"]}
    found = {}
    for name, entry in manifest["entries"].items():
        whole = np.zeros(entry["shape"], BITS[entry["dtype"]])
        times = np.zeros(entry["shape"], np.int64)
        for piece in entry["pieces"]:
            key = f"{name}@{','.join(map(str, piece['offsets']))}"
            if key not in shards[piece["file"]]:
                raise Malformed(f"{piece['file']} has no {key}")
            kind, values = shards[piece["file"]].pop(key)
            if kind != CALLED[entry["dtype"]] or list(values.shape) != piece["sizes"]:
                raise Malformed(f"{key} is {kind} {values.shape}, the manifest has {piece}")
            place = tuple(
                slice(offset, offset + size)
                for offset, size in zip(piece["offsets"], piece["sizes"], strict=True)
            )
            if whole[place].shape != values.shape:
                raise Malformed(f"{key} leaves the shape {entry['shape']}")
            whole[place] = values
            times[place] += 1
        if (times != 1).any():
            where = np.argwhere(times != 1)[0].tolist()
            raise Malformed(f"{name}: element {where} is written {times[tuple(where)]} times")
        found[name] = Global(entry["dtype"], whole)
    if left := [f"{file}: {key}" for file, tensors in shards.items() for key in tensors]:
        raise Malformed(f"not in the manifest: {left}")
    return found


def _tensors(path: Path) -> dict[str, tuple[str, Array]]:
    """Return type and bits of a safetensors file's tensors, which fill it without gaps."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    of = {called: BITS[dtype] for dtype, called in CALLED.items()}
    tensors, end = {}, 0
    for key, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = said["data_offsets"]
        if start != end:
            raise Malformed(f"{path}: {key} begins at {start}, what is before it ends at {end}")
        bits = np.frombuffer(values[start:stop], of[said["dtype"]]).reshape(said["shape"])
        tensors[key], end = (said["dtype"], bits), stop
    if end != len(values):
        raise Malformed(f"{path} has {len(values)} bytes of values, the header {end}")
    return tensors


def in_type(tensor: Global, dtype: str) -> Global:
    """Convert a tensor to another type: widened, or rounded to the nearest, ties to even."""
    bits, change = tensor.bits, (tensor.dtype, dtype)
    if tensor.dtype == dtype:
        return tensor
    if change == ("bf16", "fp32"):
        return Global(dtype, bits.astype(np.uint32) << 16)
    if change == ("fp32", "bf16"):
        wide = bits.astype(np.uint64)  # room for the carry
        return Global(dtype, ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16))
    raise ValueError(f"{tensor.dtype} is not kept as {dtype}")
