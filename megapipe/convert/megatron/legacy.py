"""Megatron-LM's older format: a file for each tensor- and pipeline-parallel rank.

A file is a pickled dictionary: ``args``; ``model``, a state dict of what the rank holds, or with
virtual stages ``model0``, ``model1``, ...; and what is not read here. A stage counts its layers
from 0.
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
from megapipe.convert.tensor_files import DTYPES
from megapipe.errors import CheckpointError
from megapipe.words import count_noun

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OLDEST_VERSION = 3.0

State = Mapping[str, Tensor]


class LegacyShards:
    """Parts of global tensors, by their names with layers numbered over all stages; mapped from the
    files. Make one with :meth:`open`."""

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
            CheckpointError: one is missing, damaged, not trusted, or of another model.
        """
        paths = _paths(folder)
        pp = max(stage for _, stage in paths) + 1
        tp = max(rank for rank, _ in paths) + 1
        files = {at: _content(path, trust) for at, path in sorted(paths.items())}
        args = files[0, 0]["args"]
        for name, found in (("tensor", tp), ("pipeline", pp)):
            said = args.get(f"{name}_model_parallel_size")
            if said is not None and said != found:
                raise CheckpointError(
                    f"{folder} has files of {found} {name}-parallel ranks, args say {said}"
                )
        keys = [key for key in files[0, 0] if re.fullmatch(r"model\d*", key)]
        for at, content in files.items():
            if [key for key in content if re.fullmatch(r"model\d*", key)] != keys:
                raise CheckpointError(f"{paths[at]} has not the virtual stages of rank 0: {keys}")
        stages = [
            [files[rank, stage][key] for rank in range(tp)]
            for key in sorted(keys, key=lambda key: int(key[5:] or 0))
            for stage in range(pp)
        ]
        return cls(folder, args, stages)

    def names(self) -> set[str]:
        """Names of all weights."""
        return set(self._parts)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Shapes of the parts of a tensor."""
        return [tuple(part.shape) for part in self._parts[name]]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor. Raises CheckpointError for one that is not of weights."""
        dtypes = {part.dtype for part in self._parts[name]}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            found = ", ".join(sorted(map(str, dtypes)))
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {found}; expected one of {', '.join(DTYPES)}"
            )
        return dtypes.pop()

    def parts(self, name: str) -> list[Tensor]:
        """The part of a tensor that each tensor-parallel rank holds."""
        return [part.detach() for part in self._parts[name]]

    def _add(self, ranks: list[State], first: int) -> int:
        """Take in a stage whose layers are those from `first` on; how many it has."""
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
                        f"{self.folder}: {name} is no name of megatron-core's GPT"
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
    """The file of each (tensor-parallel rank, pipeline rank)."""
    found = {}
    for path in folder.iterdir():
        match = RANK.fullmatch(path.name)
        if match is None:
            continue
        if match[3] is not None:
            raise CheckpointError(f"{path}: files of expert-parallel ranks are not read here")
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
    """A file's dictionary, with `args` as one. Raises CheckpointError for another form."""
    content = load(path, trust=trust)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary with args and model")
    args = content.get("args")
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{path}: it has no args, which say what model it is")
    version = content.get("checkpoint_version", _OLDEST_VERSION)
    if not isinstance(version, int | float) or version < _OLDEST_VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version {version}, expected {_OLDEST_VERSION:g}; older ones have "
            "queries, keys and values in another order"
        )
    models = {key: state for key, state in content.items() if re.fullmatch(r"model\d*", key)}
    if not models:
        raise CheckpointError(f"{path}: it has no model")
    for key, state in models.items():
        if isinstance(state, dict) and "language_model" in state:
            raise CheckpointError(
                f"{path}: {key} is of Megatron-LM's classes before megatron-core; "
                "its tools/checkpoint/convert.py makes one of megatron-core"
            )
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and (isinstance(value, Tensor) or not is_weight(name))
            for name, value in state.items()
        ):
            raise CheckpointError(f"{path}: {key} is no state dict of tensors")
    return {**models, "args": vars(args)}
