"""Megatron-LM's older format: a file for each tensor- and pipeline-parallel rank.

A file is a pickled dictionary. It has ``args`` and ``model``, a state dict of the rank's weights
(with virtual stages ``model0``, ``model1``, ...). Other entries are ignored. Layers are numbered
from 0 in each stage.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.megatron.layout import RANK
from megapipe.convert.megatron.names import LAYERS, is_weight
from megapipe.convert.pickles import load
from megapipe.errors import CheckpointError
from megapipe.model.tensor_files import DTYPES
from megapipe.text import count_noun

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OLDEST_VERSION = 3.0

State = Mapping[str, Tensor]


class LegacyShards:
    """Weights by name, as tensor-parallel shards; layers are numbered over all stages. The files
    are memory-mapped. Make one with :meth:`open`."""

    def __init__(self, folder: Path, args: dict[str, Any], stages: list[list[State]]) -> None:
        self.folder = folder
        self.args = args
        self.form = f"legacy, tp {len(stages[0])}, {count_noun(len(stages), 'stage')}"
        self._parts: dict[str, list[Tensor]] = {}
        first = 0
        for ranks in stages:
            first += self._add(ranks, first)

    @classmethod
    def open(cls, folder: Path, *, trust: bool) -> LegacyShards:
        """Map the files of all ranks.

        Raises:
            CheckpointError: a file is missing, damaged, not trusted, or of another model.
        """
        paths = _paths(folder)
        pp = max(stage for _, stage in paths) + 1
        tp = max(rank for rank, _ in paths) + 1
        files = {at: _content(path, trust) for at, path in sorted(paths.items())}
        args = files[0, 0]["args"]
        for name, found in (("tensor", tp), ("pipeline", pp)):
            stated = args.get(f"{name}_model_parallel_size")
            if stated is not None and stated != found:
                raise CheckpointError(
                    f"{folder} has files of {found} {name}-parallel ranks, args say {stated}"
                )
        keys = [key for key in files[0, 0] if re.fullmatch(r"model\d*", key)]
        for at, content in files.items():
            if [key for key in content if re.fullmatch(r"model\d*", key)] != keys:
                raise CheckpointError(f"{paths[at]} lacks virtual stages that rank 0 has: {keys}")
        stages = [
            [files[rank, stage][key] for rank in range(tp)]
            for key in sorted(keys, key=lambda key: int(key[5:] or 0))
            for stage in range(pp)
        ]
        return cls(folder, args, stages)

    def names(self) -> set[str]:
        """Return the names of all weights."""
        return set(self._parts)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of a weight's shards."""
        return [tuple(part.shape) for part in self._parts[name]]

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a weight. Raises CheckpointError for a type that cannot be read."""
        dtypes = {part.dtype for part in self._parts[name]}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            found = ", ".join(sorted(map(str, dtypes)))
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {found}; expected one of {', '.join(DTYPES)}"
            )
        return dtypes.pop()

    def parts(self, name: str) -> list[Tensor]:
        """Return the shards of a weight, one for each tensor-parallel rank."""
        return [part.detach() for part in self._parts[name]]

    def _add(self, ranks: list[State], first: int) -> int:
        """Add a stage whose first layer has index `first` in the model; return its number of
        layers."""
        names = [sorted(filter(is_weight, state)) for state in ranks]
        for rank, own in enumerate(names):
            if own != names[0]:
                (odd, *_) = sorted(set(own) ^ set(names[0]))
                raise CheckpointError(
                    f"{self.folder}: tensor {odd} is on one of tensor-parallel ranks 0 and {rank}, "
                    "not on both"
                )
        numbers = set()
        for name in names[0]:
            full = name
            if name.startswith(LAYERS):
                number, _, rest = name.removeprefix(LAYERS).partition(".")
                if not number.isdigit():
                    raise CheckpointError(
                        f"{self.folder}: {name} is not a name of megatron-core's GPT"
                    )
                numbers.add(int(number))
                full = f"{LAYERS}{first + int(number)}.{rest}"
            self._parts.setdefault(full, [state[name] for state in ranks])
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{self.folder}: a stage has layers {sorted(numbers)}, not from 0"
            )
        return len(numbers)


def _paths(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each pair (tensor-parallel rank, pipeline rank)."""
    found = {}
    for path in folder.iterdir():
        match = RANK.fullmatch(path.name)
        if match is None:
            continue
        if match[3] is not None:
            raise CheckpointError(
                f"{path} is a file of an expert-parallel rank, which megapipe does not read"
            )
        file = next((path / name for name in _FILES if (path / name).is_file()), path / _FILES[0])
        found[int(match[1]), int(match[2] or 0)] = file
    tp, pp = (max(at) + 1 for at in zip(*found, strict=True))
    for at in ((rank, stage) for rank in range(tp) for stage in range(pp)):
        if at not in found or not found[at].is_file():
            raise CheckpointError(
                f"{folder}: there is no {_FILES[0]} of tensor-parallel rank {at[0]}, pipeline rank "
                f"{at[1]}, of {tp} x {pp}"
            )
    return found


def _content(path: Path, trust: bool) -> dict[str, Any]:
    """Return the dictionary in a file, with `args` as a dictionary. Raises CheckpointError for
    other content."""
    content = load(path, trust=trust)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary with args and model")
    args = content.get("args")
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{path} has no args, which describe the model")
    version = content.get("checkpoint_version", _OLDEST_VERSION)
    if not isinstance(version, int | float) or version < _OLDEST_VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version {version}, expected {_OLDEST_VERSION:g}: older "
            "versions store queries, keys and values in another order"
        )
    models = {key: state for key, state in content.items() if re.fullmatch(r"model\d*", key)}
    if not models:
        raise CheckpointError(f"{path}: it has no model")
    for key, state in models.items():
        if isinstance(state, dict) and "language_model" in state:
            raise CheckpointError(
                f"{path}: {key} is of Megatron-LM's classes before megatron-core: convert it "
                "with Megatron-LM's tools/checkpoint/convert.py"
            )
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and (isinstance(value, Tensor) or not is_weight(name))
            for name, value in state.items()
        ):
            raise CheckpointError(f"{path}: {key} is not a state dict of tensors")
    return {**models, "args": vars(args)}
