"""The weights of a run with ``model.source=hf:...`` as the folder of its own class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_lora
from megapipe.config.model import ModelConfig
from megapipe.convert.shards import Named
from megapipe.convert.weight_source import KIND
from megapipe.errors import CheckpointError
from megapipe.layers.lora_specs import Lora
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.hf.factory import UnitFactory
from megapipe.model.hf.lora import factor_names
from megapipe.model.hf.source import ClassSource
from megapipe.util.dtypes import Dtype


@dataclass(frozen=True)
class ExportedClass:
    """Tensors of a class made on demand from a checkpoint; those of one unit are in memory.

    Names, and the tensors that a name stands for, are those of the class's ``save_pretrained``.
    """

    checkpoint: Checkpoint
    factory: UnitFactory
    dtype: Dtype
    """Type of the parameters; buffers keep theirs."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: ModelConfig, dtype: Dtype | None) -> ExportedClass:
        """Return the class of a checkpoint's model.

        Raises:
            ConfigError: the folder of the class is gone.
            CheckpointError: the checkpoint's tensors are not those of the class.
        """
        lora = Lora.of(stored_lora(checkpoint.manifest.config))
        factory = UnitFactory(ClassSource.of(model), lora)
        stored = {**factory.trained, **factory.adapters}
        checkpoint.match({f"{KIND}{name}": tuple(p.shape) for name, p in stored.items()})
        return cls(checkpoint, factory, dtype or model.dtype)

    @property
    def model_type(self) -> str:
        model_type: str = self.factory.source.config.model_type
        return model_type

    @property
    def vocab_size(self) -> int:
        return self.factory.source.vocab_size

    @property
    def max_positions(self) -> int:
        config = self.factory.source.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None) or 0

    def named(self) -> list[Named]:
        """Return name, shape and type of each tensor, in the order of :meth:`values`."""
        names: dict[torch.dtype, Dtype] = {TORCH_DTYPES[name]: name for name in get_args(Dtype)}
        return [
            (name, tuple(tensor.shape), names[tensor.dtype])
            for unit in self._units
            for name, tensor in self._in_files(
                {name: self._typed(name, tensor.to("meta")) for name, tensor in unit.items()}
            )
        ]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name. Raises CheckpointError for damage, and for a value that
        `dtype` cannot hold."""
        for unit in self._units:
            yield from self._in_files({name: self._value(name, unit[name]) for name in unit})

    def factors(self, start: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of all adapters under the names that peft uses, which begin with
        `start`."""
        for name in self.factory.adapters:
            layer, _, which = name.removesuffix(".weight").rpartition(".lora_")
            factor = self.checkpoint.read(f"{KIND}{name}")
            yield f"{start}{layer}.lora_{which.upper()}.weight", factor

    @cached_property
    def _units(self) -> list[dict[str, Tensor]]:
        """The tensors of the class without values, by unit. Of tied tensors the first is named."""
        return self.factory.saved_tensors()

    def _in_files(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from revert_weight_conversion(self.factory.bare, dict(tensors)).items()

    def _typed(self, name: str, tensor: Tensor) -> Tensor:
        trained = name in self.factory.trained
        return tensor.to(TORCH_DTYPES[self.dtype]) if trained else tensor

    def _value(self, name: str, bare: Tensor) -> Tensor:
        if name not in self.factory.trained:
            return self.factory.untrained(name)
        stored = self._merged(name)
        rounded = self._typed(name, stored)
        if rounded.isinf().any() and not stored.isinf().any():
            raise CheckpointError(
                f"{self.checkpoint.path}: entry '{KIND}{name}' has values up to "
                f"{stored.abs().max().item():g}, {self.dtype} holds "
                f"{torch.finfo(rounded.dtype).max:g} at most; choose another --dtype"
            )
        return rounded

    def _merged(self, name: str) -> Tensor:
        """Return a stored parameter plus its adapter, if it has one, then in fp32 or fp64."""
        stored = self.checkpoint.read(f"{KIND}{name}")
        names = factor_names(name)
        if self.factory.lora is None or names[0] not in self.factory.adapters:
            return stored
        whole = stored.to(torch.promote_types(stored.dtype, torch.float32))
        a, b = (self.checkpoint.read(f"{KIND}{each}").to(whole.dtype) for each in names)
        return whole + self.factory.lora.scale * (b @ a)

    def write_config(self, folder: Path, **extra: Any) -> Any:
        """Write the class's own ``config.json`` and return the config. Special tokens are the
        class's too, whatever tokenizer a run had: `extra` is not used."""
        config = deepcopy(self.factory.source.config)
        config.architectures = [type(self.factory.bare).__name__]
        config.dtype = TORCH_DTYPES[self.dtype]
        config.save_pretrained(folder)
        return config
