"""A checkpoint of Megatron-LM's GPT, of either format, as a model that is read tensor by tensor."""

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
from megapipe.convert.source import KIND
from megapipe.convert.tensor_files import widest
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.specs import ParameterSpec, by_name
from megapipe.model.gpt.parameters import WORD_EMBEDDING, known, stage_parameters
from megapipe.model.partition import StageSpec


class Shards(Protocol):
    """Parts of global tensors, by megatron-core's names with layers numbered from 0."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Arguments of the run."""

    @property
    def form(self) -> str:
        """The format, in words."""

    def names(self) -> set[str]:
        """Names of all weights."""

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Shapes of the parts of a tensor, one for each tensor-parallel rank."""

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor. Raises CheckpointError for one that is not of weights."""

    def parts(self, name: str) -> list[Tensor]:
        """The parts. Raises CheckpointError."""


class MegatronFolder:
    """Arguments and weights; of the weights only names, shapes and types are held. It is a
    :class:`~megapipe.convert.source.WeightSource`. Make one with :meth:`open`."""

    def __init__(self, path: Path, shards: Shards, vocab_size: int | None) -> None:
        self.path = path
        self.shards = shards
        padded = model_of_args(shards.args)
        rows = known(padded.vocab_size)
        if vocab_size is not None and not 2 <= vocab_size <= rows:
            raise ConfigError(
                f"--vocab-size {vocab_size}: expected 2 to {rows}, the rows there are"
            )
        self._gated = padded.gated
        self._specs = _specs(padded)
        self._given = self._match(shards.names(), padded.tied_embeddings)
        model = padded.model_copy(update={"vocab_size": vocab_size or rows})
        self._shapes = {f"{KIND}{name}": spec.shape for name, spec in _specs(model).items()}
        dtype = widest({shards.dtype(given) for given in self._given.values()})
        self.model = model.model_copy(update={"dtype": dtype})
        """The resolved model, in the type that holds all tensors without loss."""

    @classmethod
    def open(
        cls, path: Path, *, vocab_size: int | None = None, trust: bool = False
    ) -> MegatronFolder:
        """Read arguments and headers, and compare names and shapes of all tensors with the model's.

        Args:
            path: an iteration's folder, or one with several, whose latest is taken.
            vocab_size: rows of the vocabulary to keep; default: all, with the padding.
            trust: whether pickled files may run any code.

        Raises:
            ConfigError: an argument that cannot be expressed here.
            CheckpointError: a file is missing, damaged, or needs trust that it does not have; a
                tensor is missing, unexpected, or of another shape or type.
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
        """Global tensors by the names of checkpoints, ``model/...``."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """A global tensor, as a new host tensor. Raises CheckpointError."""
        spec, given = self._specs[name.removeprefix(KIND)], self._given[name.removeprefix(KIND)]
        parts = self.shards.parts(given)
        if spec.split_dim is None:
            if any(not torch.equal(part, parts[0]) for part in parts[1:]):
                raise CheckpointError(
                    f"{self.path}: tensor {given} differs between tensor-parallel ranks, which "
                    "each hold all of it"
                )
            return parts[0].clone()
        local = _local(spec, len(parts))
        joined = torch.cat([part.reshape(local) for part in parts], dim=spec.split_dim)
        rows = self._shapes[name][0]
        return joined if rows == len(joined) else joined[:rows].clone()

    def _match(self, names: set[str], tied: bool) -> dict[str, str]:
        """Their name of each of our tensors."""
        found = {}
        for name, spec in self._specs.items():
            there = [given for given in spellings(name) if given in names]
            if not there:
                raise CheckpointError(
                    f"{self.path}: tensor {next(spellings(name))} is missing, which the stored "
                    "arguments ask for"
                )
            found[name] = there[0]
            names.discard(there[0])
            self._check_shape(there[0], spec, gated=self._gated and ".mlp.up." in name)
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

    def _check_shape(self, given: str, spec: ParameterSpec, *, gated: bool) -> None:
        shapes = self.shards.shapes(given)
        wanted = _local(spec, len(shapes))
        if gated:  # a gate and what it multiplies, one after the other
            wanted = (wanted[0] * wanted[1], *wanted[2:])
        for rank, shape in enumerate(shapes):
            if shape != wanted:
                where = f" of tensor-parallel rank {rank}" if len(shapes) > 1 else ""
                raise CheckpointError(
                    f"{self.path}: tensor {given}{where} has shape {list(shape)}; the stored "
                    f"arguments ask for {list(wanted)}"
                )


def _specs(model: ModelConfig) -> dict[str, ParameterSpec]:
    whole = StageSpec(embedding=True, layers=range(model.layers), head=True)
    return by_name(stage_parameters(model, whole))


def _local(spec: ParameterSpec, tp: int) -> tuple[int, ...]:
    """The shape of one of `tp` equal parts."""
    dim = spec.split_dim
    return tuple(n // tp if i == dim else n for i, n in enumerate(spec.shape))
