"""Reads ``model.source=hf:...``: a folder or a name of transformers, or a configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.hf import attention as own_attention
from megapipe.model.hf import experts
from megapipe.model.hub import local_folder
from megapipe.model.tensor_files import TensorFiles
from megapipe.text import one_line
from megapipe.util.dtypes import Dtype
from megapipe.util.paths import user_path
from megapipe.util.user_code import REMOTE_CODE, TRANSFORMERS, is_class_folder, refusal


@dataclass(frozen=True)
class ClassSource:
    """A class of transformers and its configuration.

    Raises ConfigError for one that cannot be read.
    """

    text: str
    """Value of ``model.source``."""
    option_items: tuple[tuple[str, Any], ...]
    """Items of ``model.options``."""
    dtype: Dtype
    """Value of ``model.dtype``."""

    @classmethod
    def of(cls, model: ModelConfig) -> ClassSource:
        """Return the source that a section `model` names."""
        assert model.source is not None
        return cls(model.source, tuple(model.options.items()), model.dtype)

    def problem(self, text: str) -> ConfigError:
        return ConfigError(f"model.source={self.text}: {text}")

    @property
    def _name(self) -> str:
        return self.text.removeprefix(TRANSFORMERS)

    @cached_property
    def folder(self) -> Path | None:
        """The folder with weights; None: the source is a configuration alone."""
        if not self._name:
            raise self.problem("expected hf:FOLDER, hf:OWNER/NAME or hf:FILE.json")
        if not is_class_folder(self.text):
            return None
        try:
            return local_folder(self._name)
        except CheckpointError as error:
            raise self.problem(str(error)) from None

    @cached_property
    def config(self) -> Any:
        """The configuration, an object of transformers."""
        if unknown := sorted(dict(self.option_items).keys() - {REMOTE_CODE}):
            raise self.problem(
                f"there is no option model.options.{unknown[0]}: expected {REMOTE_CODE}"
            )
        path = user_path(self._name) if self.folder is None else self.folder
        if not path.exists():
            raise self.problem(f"{path}: no such file")
        try:
            config = AutoConfig.from_pretrained(
                path, trust_remote_code=self._trusted, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            raise self.problem(self._reason(error)) from error
        if getattr(config, "quantization_config", None) is not None:
            raise self.problem("its weights are quantized: expected a folder in bf16, fp16 or fp32")
        return config

    def _reason(self, error: Exception) -> str:
        if "trust_remote_code" in str(error):
            return (
                "its class is Python code of the folder, which is not run: expected a class of "
                f"transformers, or model.options.{REMOTE_CODE}=true if you trust the code"
            )
        return f"transformers cannot read the configuration: {one_line(error)}"

    @property
    def _trusted(self) -> bool:
        """Whether Python code of the folder may run."""
        if dict(self.option_items).get(REMOTE_CODE) is not True:
            return False
        if (reason := refusal()) is not None:
            raise self.problem(reason)
        return True

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the class."""
        size: int = self.config.get_text_config(decoder=True).vocab_size
        return size

    @property
    def fingerprint(self) -> str:
        """The configuration, and the version of the code that it belongs to, as text."""
        return f"transformers {transformers.__version__} {self.config.to_json_string()}"

    @cached_property
    def files(self) -> TensorFiles | None:
        """The tensors of the folder; None: the source is a configuration alone."""
        if self.folder is None:
            return None
        try:
            return TensorFiles.open(self.folder)
        except CheckpointError as error:
            raise self.problem(
                f"{error}; for random weights name its config.json: "
                f"{TRANSFORMERS}{self.folder / 'config.json'}"
            ) from None

    def on_meta(self, attention: str | None) -> Any:
        """Make the class on torch's meta device. `attention`: name of its attention in
        transformers; None: transformers chooses."""
        with torch.device("meta"):
            return self._make(attention)

    def without_weights(self, attention: str | None) -> Any:
        """Make the class with buffers on the CPU, and its parameters on the meta device. For
        `attention` see :meth:`on_meta`."""
        with torch.device("cpu"), parameters_on_meta():
            return self._make(attention)

    def _make(self, attention: str | None) -> Any:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        experts.register()
        own_attention.register()
        try:
            model = AutoModelForCausalLM.from_config(
                deepcopy(self.config),
                dtype=TORCH_DTYPES[self.dtype],
                trust_remote_code=self._trusted,
                experts_implementation=experts.NAME,
                attn_implementation=attention,
            )
        except (ValueError, ImportError, NotImplementedError, AttributeError, TypeError) as error:
            raise self.problem(
                f"transformers cannot make the class: {self._reason(error)}"
            ) from error
        finally:
            transformers_logging.set_verbosity(verbosity)
        return model.train()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context, parameters of new modules are on torch's meta device."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(module, name, param)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield
