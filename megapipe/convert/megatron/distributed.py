"""Megatron-LM's distributed format, torch_dist: global tensors in torch's DCP, and ``common.pt``.

A weight of all layers is one tensor with a layer dimension
(``decoder.layers.mlp.linear_fc2.weight``) or a tensor for each layer (``decoder.layers.0. ...``). A
gate and its up projection are two shards of one tensor, or two tensors whose names end in ``_w``
and ``_v``.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.dcp.files import DcpFiles
from megapipe.convert.megatron.layout import FORMAT
from megapipe.convert.megatron.names import LAYERS, is_weight
from megapipe.convert.pickles import load
from megapipe.errors import CheckpointError
from megapipe.model.tensor_files import read_json

COMMON = "common.pt"
_KEY, _ONLY = "sharded_backend", "torch_dist"
_HALVES = ("_w", "_v")


class DistributedShards:
    """Global tensors by name, with layers numbered from 0; none is kept in memory. Make one with
    :meth:`open`."""

    form = "torch_dist"

    def __init__(self, folder: Path, args: dict[str, Any], files: DcpFiles) -> None:
        self.folder = folder
        self.args = args
        self.files = files
        self._at: dict[str, list[tuple[str, tuple[slice, ...]]]] = {}
        """Names of the stored tensors that each weight consists of, with the slices of each."""
        for name, stored in files.tensors.items():
            if not is_weight(name):
                continue
            base = name.removesuffix(_HALVES[0])
            if base != name and base + _HALVES[1] in files.tensors:
                names = [base + half for half in _HALVES]
            elif name.endswith(_HALVES[1]) and name[:-2] + _HALVES[0] in files.tensors:
                continue
            else:
                base, names = name, [name]
            rest = base.removeprefix(LAYERS)
            if rest == base or rest.partition(".")[0].isdigit():
                self._at[base] = [(each, ()) for each in names]
                continue
            for layer in range(stored.shape[0] if stored.shape else 0):
                index = (slice(layer, layer + 1),)
                self._at[f"{LAYERS}{layer}.{rest}"] = [(each, index) for each in names]

    @classmethod
    def open(cls, folder: Path, *, trust: bool) -> DistributedShards:
        """Read the DCP index and the stored arguments.

        Raises:
            CheckpointError: a file is missing, damaged or not trusted, or has another format.
        """
        backend = read_json(folder / FORMAT).get(_KEY)
        if backend != _ONLY:
            raise CheckpointError(f"{folder / FORMAT}: {_KEY} is {backend!r}; only {_ONLY} is read")
        common = load(folder / COMMON, trust=trust)
        args = common.get("args") if isinstance(common, dict) else None
        if not isinstance(args, Namespace):
            raise CheckpointError(f"{folder / COMMON} has no args, which describe the model")
        return cls(folder, vars(args), DcpFiles.open(folder, trust=trust))

    def names(self) -> set[str]:
        """Return the names of all weights."""
        return set(self._at)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shape of a weight, in a list of one: the format has no tp shards."""
        shapes = [self.files.tensors[each].shape[len(index) :] for each, index in self._at[name]]
        if len(shapes) > 1:
            return [(sum(shape[0] for shape in shapes), *shapes[0][1:])]
        return shapes

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a weight. Raises CheckpointError for a type that cannot be read."""
        return self.files.dtype(self._at[name][0][0])

    def parts(self, name: str) -> list[Tensor]:
        """Return a weight, in a list of one tensor: the format has no tp shards."""
        found = [self.files.read(each, index) for each, index in self._at[name]]
        found = [x[0] if index else x for x, (_, index) in zip(found, self._at[name], strict=True)]
        return [torch.cat(found) if len(found) > 1 else found[0]]
