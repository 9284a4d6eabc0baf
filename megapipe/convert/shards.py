"""Writing of tensors to safetensors shard files of bounded size, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

from torch import Tensor

from megapipe.checkpoint.durable import create
from megapipe.checkpoint.shard import bytes_of, safetensors_header
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.tensor_files import DTYPES, INDEX, SINGLE
from megapipe.util.dtypes import DTYPE_BYTES, Dtype

Named = tuple[str, tuple[int, ...], Dtype]
"""Name, shape and type of a tensor."""


def plan(tensors: Iterable[Named], most: int) -> dict[str, list[Named]]:
    """Return the tensors of each shard file, by file name as in transformers. A file has at most
    `most` bytes, or one larger tensor."""
    shards: list[list[Named]] = [[]]
    size = 0
    for name, shape, dtype in tensors:
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, dtype))
        size += nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def write(
    folder: Path,
    planned: dict[str, list[Named]],
    values: Iterable[tuple[str, Tensor]],
    report: Callable[[str], None],
) -> None:
    """Write the files of :func:`plan`, and an index if there are several.

    `values` yields all tensors with their names, in the plan's order and with its shapes and types.
    `report` is called with a line after each file. Raises :class:`CheckpointError` if a file cannot
    be written.
    """
    names = {kind: name for name, kind in DTYPES.items()}
    coming, total = iter(values), 0
    for file, tensors in planned.items():
        rows = [
            (name, names[TORCH_DTYPES[dtype]], shape, prod(shape) * DTYPE_BYTES[dtype])
            for name, shape, dtype in tensors
        ]
        with create(folder / file) as out:
            out.write(safetensors_header(rows, {}))
            for name, shape, dtype in tensors:
                found, tensor = next(coming)
                kind = (found, tuple(tensor.shape), tensor.dtype)
                assert kind == (name, shape, TORCH_DTYPES[dtype]), (kind, name, shape)
                out.write(bytes_of(tensor.contiguous()))
        total += sum(nbytes for *_, nbytes in rows)
        report(f"{file}: {len(tensors):,} tensors, {total / 1e9:,.3f} GB so far")
    if len(planned) > 1:
        weight_map = {name: file for file, tensors in planned.items() for name, *_ in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with create(folder / INDEX) as out:
            out.write((json.dumps(index, indent=2) + "\n").encode())
