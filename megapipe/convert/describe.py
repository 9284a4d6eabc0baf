"""Describes a folder of a model or a checkpoint, in lines and as a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.cli import stored_lora, stored_model
from megapipe.config import strict_yaml
from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.section import Section
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.convert.source import CONFIG, WeightSource
from megapipe.convert.tensor_files import DTYPES, StoredTensors
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.hf.table import TABLE
from megapipe.words import count_noun


def as_configuration(
    model: ModelConfig, *, tokenizer: str | None = None, load: StorageLocation | None = None
) -> str:
    """A resolved model, with its tokenizer and what its weights are loaded from, as YAML that
    train.py takes. Keys of the model with their defaults are left out."""
    fields = _changed(model)
    if "moe" in fields:
        fields["moe"] = _changed(model.moe)
    tree: dict[str, Any] = {"model": fields}
    if tokenizer is not None:
        tree["data"] = {"tokenizer": tokenizer}
    if load is not None:
        tree["checkpoint"] = {"load": str(load)}
    return strict_yaml.dump(tree)


def _changed(section: Section) -> dict[str, Any]:
    """The fields that have not their defaults."""
    return {
        name: getattr(section, name)
        for name, info in type(section).model_fields.items()
        if getattr(section, name) != info.get_default(call_default_factory=True)
    }


def line_of_balance(model: ModelConfig) -> str | None:
    """Tell with which balance of experts a folder's model is trained, if not with the default."""
    balance, usual = model.moe.balance, MoEConfig().balance
    if model.moe.experts is None or balance == usual:
        return None
    return (
        f"by its {CONFIG} the model is trained with model.moe.balance={balance:g}: a run without "
        f"this key takes {usual:g}"
    )


def lines_of_files(files: StoredTensors) -> Iterator[str]:
    """Sizes and types of the tensors in a folder."""
    values = sum(prod(stored.shape) for stored in files.tensors.values())
    nbytes = sum((files.folder / file).stat().st_size for file in files.files)
    dtypes = sorted({stored.dtype for stored in files.tensors.values()})
    yield (
        f"{count_noun(len(files.tensors), 'tensor')} of {values:,} values, {', '.join(dtypes)}, "
        f"{nbytes / 1e9:,.3f} GB in {count_noun(len(files.files), 'file')}"
    )
    if files.note is not None:
        yield files.note
    if odd := [dtype for dtype in dtypes if dtype not in DTYPES]:
        yield f"types that are not read here: {', '.join(odd)}"


def lines_of_folder(folder: HuggingFaceFolder) -> Iterator[str]:
    """The family and the sizes of a model of Hugging Face's."""
    row, model = folder.row, folder.model
    yield f"{folder.path}: {row.model_type} ({row.model_class})"
    yield from lines_of_files(folder.files)
    yield _sizes(model, sum(prod(shape) for shape in folder.shapes().values()))
    if (line := line_of_balance(model)) is not None:
        yield line


def lines_of_source(source: WeightSource, kind: str) -> Iterator[str]:
    """Where a model is of somebody else's `kind`, and its sizes."""
    yield f"{source.path}: {kind}"
    yield _sizes(source.model, sum(prod(shape) for shape in source.shapes().values()))


def lines_of_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    """Where a checkpoint comes from, its sizes, and which classes can express its model."""
    manifest = checkpoint.manifest
    layout = " x ".join(f"{name} {size}" for name, size in manifest.layout.items())
    yield f"{checkpoint.path}: checkpoint of step {manifest.step} by {layout}"
    kinds = sorted({name.split("/")[0] for name in manifest.entries} - {"model", "routing"})
    weights = {n: e for n, e in manifest.entries.items() if n.startswith("model/")}
    dtypes = sorted({entry.dtype for entry in weights.values()})
    nbytes = sum(record.bytes for record in manifest.files.values())
    state = ", ".join(kind.removeprefix("optimizer.") for kind in kinds)
    yield (
        f"{count_noun(len(weights), 'tensor')} of weights in {', '.join(dtypes)}; "
        f"{f'optimizer state: {state}' if state else 'no optimizer state'}; "
        f"{nbytes / 1e9:,.3f} GB in {count_noun(len(manifest.files), 'file')}"
    )
    lora = stored_lora(manifest.config)
    if lora.rank is not None:
        yield f"adapters of rank {lora.rank} beside {', '.join(lora.targets)}"
    model = stored_model(manifest.config)
    if model.source is not None:
        yield f"model.source={model.source}, a model of your own: no class of Hugging Face's"
        return
    yield _sizes(model, sum(prod(entry.shape) for entry in weights.values()))
    fitting = [name for name, row in TABLE.items() if not list(row.misfits(model))]
    if fitting:
        yield f"classes of Hugging Face's that express it: {', '.join(fitting)}"
        return
    try:
        row_of(model)
    except ConfigError as error:
        yield f"no class of Hugging Face's expresses it: {error}"


def _sizes(model: ModelConfig, parameters: int) -> str:
    return (
        f"{parameters:,} parameters, {model.dtype}; {count_noun(model.layers, 'layer')}, hidden "
        f"{model.hidden:,}, {count_noun(model.max_positions or 0, 'position')}, vocabulary "
        f"{model.vocab_size or 0:,}, embeddings {'tied' if model.tied_embeddings else 'not tied'}"
    )
