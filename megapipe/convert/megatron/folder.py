"""A Megatron-LM GPT checkpoint, of either format, as a model that is read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.convert.megatron.arguments import model_of_args
from megapipe.convert.megatron.distributed import DistributedShards
from megapipe.convert.megatron.layout import FORMAT, find_iteration
from megapipe.convert.megatron.legacy import LegacyShards
from megapipe.convert.megatron.names import HEAD, spellings
from megapipe.convert.weight_source import KIND
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.specs import ParameterSpec, by_name
from megapipe.model.gpt.parameters import WORD_EMBEDDING, known, stage_parameters
from megapipe.model.partition import StageSpec
from megapipe.model.tensor_files import widest


class Shards(Protocol):
    """Weights as tensor-parallel shards, by megatron-core's names with layers numbered from 0."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Arguments that Megatron-LM has stored."""

    @property
    def form(self) -> str:
        """Name of the checkpoint's format."""

    def names(self) -> set[str]:
        """Return the names of all weights."""

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of a weight's shards, one for each tensor-parallel rank."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a weight. Raises CheckpointError for a type that cannot be read."""

    def parts(self, name: str) -> list[Tensor]:
        """Return the shards of a weight. Raises CheckpointError."""


class MegatronFolder:
    """Arguments and weights of a model; only names, shapes and types of the weights are in memory.
    It is a :class:`~megapipe.convert.weight_source.WeightSource`. Make one with :meth:`open`."""

    def __init__(self, path: Path, shards: Shards, vocab_size: int | None) -> None:
        self.path = path
        self.shards = shards
        padded = model_of_args(shards.args)
        rows = known(padded.vocab_size)
        if vocab_size is not None and not 2 <= vocab_size <= rows:
            raise ConfigError(
                f"--vocab-size {vocab_size}: expected 2 to {rows}, the embedding's rows"
            )
        self._gated = padded.gated
        self._specs = _specs(padded)
        self._stored_names = self._match(shards.names(), padded.tied_embeddings)
        model = padded.model_copy(update={"vocab_size": vocab_size or rows})
        self._shapes = {f"{KIND}{name}": spec.shape for name, spec in _specs(model).items()}
        dtype = widest({shards.dtype(stored_name) for stored_name in self._stored_names.values()})
        self.model = model.model_copy(update={"dtype": dtype})
        """Resolved model, with a type that holds the values of all tensors without loss."""

    @classmethod
    def open(
        cls, path: Path, *, vocab_size: int | None = None, trust: bool = False
    ) -> MegatronFolder:
        """Read arguments and headers, and compare names and shapes of all tensors with the model's.

        Args:
            path: folder of an iteration, or a folder of several; then the latest one is read.
            vocab_size: number of rows of the embedding to keep; default: all, with the padding.
            trust: whether pickled files may run any code.

        Raises:
            ConfigError: megapipe cannot express an argument.
            CheckpointError: a file is missing, damaged, or runs code and is not trusted; a tensor
                is missing, unexpected, or of another shape or type.
        """
        folder = find_iteration(path)
        legacy = not (folder / FORMAT).exists()
        kind = LegacyShards if legacy else DistributedShards
        shards: Shards = kind.open(folder, trust=trust)
        try:
            return cls(folder, shards, vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the global tensors by their names in checkpoints, ``model/...``."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return a global tensor, as a new host tensor. Raises CheckpointError."""
        spec, stored_name = (
            self._specs[name.removeprefix(KIND)],
            self._stored_names[name.removeprefix(KIND)],
        )
        parts = self.shards.parts(stored_name)
        if spec.split_dim is None:
            if any(not torch.equal(part, parts[0]) for part in parts[1:]):
                raise CheckpointError(
                    f"{self.path}: tensor {stored_name} differs between tensor-parallel ranks, "
                    "which must have equal copies"
                )
            return parts[0].clone()
        local = _local(spec, len(parts))
        joined = torch.cat([part.reshape(local) for part in parts], dim=spec.split_dim)
        rows = self._shapes[name][0]
        return joined if rows == len(joined) else joined[:rows].clone()

    def _match(self, names: set[str], tied: bool) -> dict[str, str]:
        """Return Megatron-LM's name for each of megapipe's tensors."""
        found = {}
        for name, spec in self._specs.items():
            present = [stored_name for stored_name in spellings(name) if stored_name in names]
            if not present:
                raise CheckpointError(
                    f"{self.path}: tensor {next(spellings(name))} is missing, which the stored "
                    "arguments ask for"
                )
            found[name] = present[0]
            names.discard(present[0])
            self._check_shape(present[0], spec, gated=self._gated and ".mlp.up." in name)
        if tied and HEAD in names:
            names.discard(HEAD)
            same = map(torch.equal, *map(self.shards.parts, (HEAD, found[WORD_EMBEDDING])))
            if not all(same):
                raise CheckpointError(
                    f"{self.path}: {HEAD} differs from the embedding, but "
                    "untie_embeddings_and_output_weights is False"
                )
        if names:
            raise CheckpointError(
                f"{self.path}: tensor {min(names)} is not part of the model that the stored "
                f"arguments describe ({len(names)} such tensors)"
            )
        return found

    def _check_shape(self, stored_name: str, spec: ParameterSpec, *, gated: bool) -> None:
        shapes = self.shards.shapes(stored_name)
        wanted = _local(spec, len(shapes))
        if gated:  # the gate and the up projection, one after the other
            wanted = (wanted[0] * wanted[1], *wanted[2:])
        for rank, shape in enumerate(shapes):
            if shape != wanted:
                of_rank = f" of tensor-parallel rank {rank}" if len(shapes) > 1 else ""
                raise CheckpointError(
                    f"{self.path}: tensor {stored_name}{of_rank} has shape {list(shape)}; the "
                    f"stored arguments ask for {list(wanted)}"
                )


def _specs(model: ModelConfig) -> dict[str, ParameterSpec]:
    whole = StageSpec(embedding=True, layers=range(model.layers), head=True)
    return by_name(stage_parameters(model, whole))


def _local(spec: ParameterSpec, tp: int) -> tuple[int, ...]:
    """Return the shape of one of `tp` equal shards of a tensor."""
    dim = spec.split_dim
    return tuple(n // tp if i == dim else n for i, n in enumerate(spec.shape))
