"""Adapters of a checkpoint (LoRA): merged into its weights, or as a folder that peft loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megapipe.checkpoint.durable import create
from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_lora, stored_model
from megapipe.config.model import ModelConfig
from megapipe.convert.atomic_folder import atomic_folder
from megapipe.convert.shards import Named, write
from megapipe.errors import ConfigError
from megapipe.layers.lora_specs import ALL_ROWS, Lora
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.hf.table import HFClass
from megapipe.model.gpt.hf.weights import TensorMapping
from megapipe.model.gpt.lora import (
    HEADS,
    MLP,
    QKV,
    adapter_name,
    adapter_targets,
    module_of,
    targets_in,
    with_adapters,
)
from megapipe.model.gpt.parameters import stage_parameters
from megapipe.model.partition import StageSpec
from megapipe.util.dtypes import Dtype
from megapipe.util.user_code import TRANSFORMERS, is_class_name

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PEFT = "base_model.model."
"""Beginning of the names that peft gives to a model's layers."""
GATED = ("mlp.gate", "mlp.up")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint's model."""

    checkpoint: Checkpoint
    model: ModelConfig
    lora: Lora | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: ModelConfig) -> Adapters:
        """Return the adapters that the checkpoint's configuration describes."""
        return cls(checkpoint, model, Lora.of(stored_lora(checkpoint.manifest.config)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapters' entries in the checkpoint."""
        whole = StageSpec(embedding=True, layers=range(self.model.layers), head=True)
        if self.lora is None:
            return {}
        specs = with_adapters(self.model, stage_parameters(self.model, whole), self.lora)
        return {f"model/{spec.name}": spec.shape for spec in specs if not spec.frozen}

    def factors(self, layer: int, target: str) -> tuple[Tensor, Tensor]:
        """Return an adapter's matrices A [rank, in] and B [out, rank]."""
        name = f"model/{adapter_name(self.model, layer, target)}"
        return self.checkpoint.read(f"{name}.lora_a"), self.checkpoint.read(f"{name}.lora_b")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return `weight`, the parameter `name`, plus its adapters (if any), in fp32 or fp64."""
        if self.lora is None or not name.startswith("layers."):
            return weight
        _, number, module = name.split(".", 2)
        layer, found = int(number), adapter_targets(self.model)
        beside = [
            each
            for each in targets_in(self.model, self.lora, layer)
            if module == f"{module_of(self.model, layer, found[each].layer)}.weight"
        ]
        if not beside:
            return weight
        whole = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for target in beside:
            rows = found[target].rows
            a, b = (factor.to(whole.dtype) for factor in self.factors(layer, target))
            matrix = whole.view(-1, whole.shape[-1])
            part = matrix.unflatten(0, rows.shape)[:, rows.start : rows.stop]
            part += (self.lora.scale * (b @ a)).view(part.shape)
        return whole


def export_adapters(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: Dtype | None = None,
    model_type: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the adapters of `checkpoint` to `output`, as ``peft.PeftModel`` loads them.

    If queries, keys and values share a matrix A, but the Hugging Face class has a layer for each,
    all three layers get the same A. `dtype` is the type in the checkpoint by default. `report` is
    called with a line of progress.

    Raises:
        ConfigError: there are no adapters; no class can express the model, or the class lacks the
            adapters' layers; or peft would apply the adapters to other layers.
        CheckpointError: the checkpoint is damaged, or `output` exists.
    """
    stored = checkpoint.manifest.config
    model = stored_model(stored)
    adapters = Adapters.of(checkpoint, model)
    if adapters.lora is None:
        raise ConfigError(f"{checkpoint.path} has no adapters (lora.rank is null)")
    of_class = is_class_name(model.source)
    found = _of_class(checkpoint, model) if of_class else _of_family(adapters, model, model_type)
    kept = next(name for name in get_args(Dtype) if TORCH_DTYPES[name] == found.values[0][1].dtype)
    dtype = dtype or kept
    values = [(name, factor.to(TORCH_DTYPES[dtype])) for name, factor in found.values]
    named: list[Named] = [(name, tuple(factor.shape), dtype) for name, factor in values]
    with atomic_folder(output) as folder:
        with create(folder / CONFIG) as file:
            file.write((json.dumps(_config(stored, found), indent=2) + "\n").encode())
        write(folder, {WEIGHTS: named}, values, report)


class _PeftAdapters(NamedTuple):
    """Adapters as peft has them."""

    base: object
    """Folder or name of the adapted weights."""
    layers: str
    """Path of the list of layers in the class."""
    turned: bool
    """Whether the class's linear layers have weights [in, out]."""
    values: list[tuple[str, Tensor]]
    """All adapter matrices by the names of peft."""


def _of_class(checkpoint: Checkpoint, model: ModelConfig) -> _PeftAdapters:
    """Return the adapters of a class of transformers, which are on its own layers."""
    from megapipe.convert.class_export import ExportedClass  # loads transformers

    exported = ExportedClass.of(checkpoint, model, None)
    assert model.source is not None
    base = checkpoint.manifest.config.get("checkpoint.load")
    if base is None:
        base = model.source.removeprefix(TRANSFORMERS)
    layers = exported.factory.outline.stack
    return _PeftAdapters(base, layers, False, [*exported.factors(PEFT)])


def _of_family(adapters: Adapters, model: ModelConfig, model_type: str | None) -> _PeftAdapters:
    """Return the adapters of the built-in model on the layers of a Hugging Face class."""
    assert adapters.lora is not None
    row = row_of(model, model_type)
    of_mlp = [target for target in adapters.lora.targets if target.startswith(MLP)]
    if row.has_experts and of_mlp:
        raise ConfigError(
            f"lora.targets has {of_mlp[0]}, a name that peft takes for experts of the Hugging "
            f"Face {row.model_type} class: remove --adapter to write merged weights"
        )
    turned = row.counterpart("layers.0.attention.out").arrangement == "transposed"
    base = adapters.checkpoint.manifest.config.get("checkpoint.load")
    return _PeftAdapters(base, row.layers, turned, [*_of_peft(adapters, row)])


def _of_peft(adapters: Adapters, row: HFClass) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapter matrices under the names that peft uses."""
    assert adapters.lora is not None
    for layer in range(adapters.model.layers):
        for target in targets_in(adapters.model, adapters.lora, layer):
            a, b = adapters.factors(layer, target)
            for name, part in _layers(adapters.model, row, layer, target, b):
                yield f"{PEFT}{name}.lora_A.weight", a
                yield f"{PEFT}{name}.lora_B.weight", part.contiguous()


def _layers(
    model: ModelConfig, row: HFClass, layer: int, target: str, b: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face layers to which an adapter belongs, as (name, B [out, rank])."""
    adapted = adapter_targets(model)[target]
    names, arrangement, _ = row.counterpart(
        f"layers.{layer}.{module_of(model, layer, adapted.layer)}"
    )
    if adapted.rows == ALL_ROWS:
        parts = TensorMapping(target, tuple(b.shape), names, arrangement).transform.split(b, model)
        if arrangement in ("transposed", "blocks"):  # the class's weight is, but B is not
            parts = tuple(part.t() for part in parts)
        yield from zip(names, parts, strict=True)
        return
    order = HEADS if adapted.layer == QKV else GATED
    if len(names) != len(order):
        raise ConfigError(
            f"lora.targets has {target}, which is not a separate layer of the Hugging Face "
            f"{row.model_type} class: remove --adapter to write merged weights"
        )
    yield names[order.index(target)], b


def _config(stored: Any, found: _PeftAdapters) -> dict[str, Any]:
    """Return the keys and values of peft's LoraConfig."""
    section = stored_lora(stored)
    start = f"{PEFT}{found.layers}."
    inner = (name.removeprefix(start).partition(".")[2] for name, _ in found.values)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": found.base,
        "r": section.rank,
        "lora_alpha": int(section.alpha) if section.alpha == int(section.alpha) else section.alpha,
        "use_rslora": section.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": found.turned,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in inner}),
        "inference_mode": True,
    }
