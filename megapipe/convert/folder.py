"""A model folder as transformers saves it, with the interface of a checkpoint: global tensors by
megapipe's names, read by regions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.regions import Region, whole
from megapipe.cli import flatten
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.convert.class_check import check_class
from megapipe.convert.weight_source import CONFIG, KIND
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.hf.config import class_named, config_from_hf
from megapipe.model.gpt.hf.table import TABLE, HFClass
from megapipe.model.gpt.hf.weights import TensorMapping, entries_in, full_names
from megapipe.model.gpt.parameters import WORD_EMBEDDING, known
from megapipe.model.tensor_files import StoredTensors, TensorFiles, read_json, widest
from megapipe.text import one_line


class HuggingFaceFolder:
    """Config and weights of a model; only names, shapes and types of the weights are in memory.

    Make one with :meth:`open`. A folder can replace a checkpoint that has only weights.
    """

    def __init__(self, path: Path, row: HFClass, model: ModelConfig, files: StoredTensors) -> None:
        self.path = path
        self.row = row
        self.files = files
        self._stored_names = full_names(row, files.tensors)
        self._entries = {e.name: e for e in entries_in(row, model, self._stored_names.keys())}
        self._check(model)
        weights = (entry for entry in self._entries.values() if not entry.is_buffer)
        used = (name for entry in weights for name in entry.hf_names)
        dtype = widest({files.dtype(self._stored_names[name]) for name in used})
        self.model = model.model_copy(update={"dtype": dtype})
        """Resolved model, with a type that holds the values of all tensors without loss."""

    @classmethod
    def open(cls, path: Path, *, compare: bool = True) -> HuggingFaceFolder:
        """Read config and headers, and compare names and shapes of all tensors with the model's.

        Args:
            compare: whether to check that the class computes the same as megapipe.

        Raises:
            ConfigError: megapipe cannot express the model's family, or a value of the config.
            CheckpointError: a file is missing or damaged; a tensor is missing, unexpected, or of
                another shape or type; tied embeddings differ.
        """
        return cls.of(path, *read_model(path, compare=compare))

    @classmethod
    def of(cls, path: Path, model_type: str, model: ModelConfig) -> HuggingFaceFolder:
        """Open a folder whose config is read already; :func:`read_model` has returned `model_type`
        and `model`. Reads headers and checks tensors as :meth:`open` does."""
        return cls(path, TABLE[model_type], model, TensorFiles.open(path))

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Settings of the section `model`, by full name ("model.layers"), as in a checkpoint."""
        keys = flatten(Config(model=self.model))
        return {key: value for key, value in keys.items() if key.startswith("model.")}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the global tensors by their names in checkpoints, ``model/...``."""
        return {f"{KIND}{name}": entry.shape for name, entry in self._entries.items()}

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the folder has exactly the tensors `shapes`. Raises CheckpointError."""
        own = self.shapes()
        for name in sorted(own.keys() | shapes.keys()):
            if own.get(name) != shapes.get(name):
                raise CheckpointError(
                    f"{self.path}: entry {name!r} has shape {own.get(name)}, the model's "
                    f"{shapes.get(name)}"
                )

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a region of a global tensor (default: all of it), as a new host tensor.

        Only the needed slices are read if the tensor's rows (head groups, for queries, keys and
        values) are also rows in the files, otherwise the whole tensor. Raises CheckpointError.
        """
        entry = self._entries[name.removeprefix(KIND)]
        region = whole(entry.shape) if region is None else region
        index = region.inside(whole(entry.shape))
        names = [self._stored_names[each] for each in entry.hf_names]
        if entry.arrangement == "same":
            return self.files.read(names[0], index)
        if entry.arrangement == "transposed":
            return self.files.read(names[0], index[::-1]).t().contiguous()
        if reads := list(_of_stacked(entry, names, index)):
            dtype = widest({self.files.dtype(each) for each, _ in reads})
            out = torch.empty(region.sizes, dtype=TORCH_DTYPES[dtype])
            for part, read in zip(out.view(len(reads), -1), reads, strict=True):
                part.copy_(self.files.read(*read).flatten())
            return out
        if entry.arrangement == "apart":
            return self._groups(entry, names, index)
        parts = tuple(self.files.read(each) for each in names)
        return entry.transform.join(parts, self.model)[index].contiguous()

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out` with a region of a global tensor. Raises CheckpointError."""
        out.copy_(self.read(name, region))

    def _groups(self, entry: TensorMapping, names: list[str], index: tuple[slice, ...]) -> Tensor:
        """Return the slices `index` of a joint qkv tensor; only their head groups are read."""
        model, rows = self.model, index[0]
        width, queries = known(model.head_dim), model.heads // known(model.kv_heads)
        height = (queries + 2) * width
        first, last = rows.start // height, -(-rows.stop // height)
        some = model.model_copy(
            update={"kv_heads": last - first, "heads": (last - first) * queries}
        )
        heights = (queries * width, width, width)
        parts = tuple(
            self.files.read(name, (slice(first * n, last * n), *index[1:]))
            for name, n in zip(names, heights, strict=True)
        )
        start = first * height
        joined = entry.transform.join(parts, some)
        return joined[rows.start - start : rows.stop - start].contiguous()

    def _check(self, model: ModelConfig) -> None:
        left = dict(self._stored_names)
        for entry in self._entries.values():
            for name, shape in zip(entry.hf_names, entry.hf_shapes(model), strict=True):
                if name not in left:
                    raise CheckpointError(
                        f"{self.path}: tensor {name} is missing; {CONFIG} asks for it with shape "
                        f"{list(shape)}"
                    )
                stored = self.files.tensors[left.pop(name)]
                if stored.shape != shape:
                    raise CheckpointError(
                        f"{self.path / stored.file}: tensor {name} has shape "
                        f"{list(stored.shape)}; {CONFIG} asks for {list(shape)}"
                    )
        head = f"{self.row.modules['head']}.weight"
        if model.tied_embeddings and head in left:
            self._check_tied(left.pop(head))
        if left:
            raise CheckpointError(
                f"{self.path}: tensor {min(left)} is not part of the model that {CONFIG} "
                f"describes ({len(left)} such tensors)"
            )

    def _check_tied(self, head: str) -> None:
        (embedding,) = (self._stored_names[name] for name in self._entries[WORD_EMBEDDING].hf_names)
        if not self.files.equal(head, embedding):
            raise CheckpointError(
                f"{self.path}: {head} differs from {embedding}, but {CONFIG} ties them; expected "
                "tie_word_embeddings false"
            )


def _of_stacked(
    entry: TensorMapping, names: list[str], index: tuple[slice, ...]
) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield, in order, the stored tensors (by name) and the slices of them that make up the slices
    `index` of a stack. Yield nothing if `entry` is not a stack."""
    outer = range(entry.shape[0])[index[0]]
    if entry.arrangement == "stacked":
        yield from ((names[i], index[1:]) for i in outer)
    if entry.arrangement not in ("pairs", "joined"):
        return
    inner = entry.shape[2]
    for i, half in product(outer, range(2)[index[1]]):
        if entry.arrangement == "pairs":
            yield names[2 * i + half], index[2:]
        else:
            rows = slice(half * inner + index[2].start, half * inner + index[2].stop)
            yield names[0], (slice(i, i + 1), rows, index[3])


def read_model(path: Path, *, compare: bool = True) -> tuple[str, ModelConfig]:
    """Read the config of a folder; return the class's ``model_type`` and the resolved model.

    Args:
        compare: check whether the class computes the same as megapipe, which may take seconds.

    Raises:
        ConfigError: megapipe cannot express the model's family or a value of the config, or the
            class computes another model from the config.
        CheckpointError: there is no config.
    """
    config = _read_config(path)
    try:
        model = config_from_hf(config)
        if compare:
            check_class(config)
    except ConfigError as error:
        raise ConfigError(f"{path / CONFIG}: {error}") from None
    except (ArithmeticError, LookupError, TypeError, AttributeError) as error:  # such as 0 heads
        raise ConfigError(
            f"{path / CONFIG} does not describe a model: {one_line(error)}"
        ) from error
    return config.model_type, model


def _read_config(path: Path) -> Any:
    """Return the config of a folder, as an object of transformers."""
    content = read_json(path / CONFIG)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in TABLE:
        raise ConfigError(
            f"{path / CONFIG}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(TABLE)}"
        )
    if (quantized := content.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        described = json.dumps(quantized) if method is None else method
        raise ConfigError(
            f"{path / CONFIG}: quantization_config ({described}): megapipe does not read quantized "
            "weights: expected the model in bf16, fp16, fp32 or fp64, without this key"
        )
    try:
        return class_named(TABLE[model_type].config_class).from_dict(content)
    except Exception as error:  # whatever the class raises for its values
        raise ConfigError(f"{path / CONFIG}: {one_line(error)}") from error
