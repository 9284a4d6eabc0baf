"""Descriptions of a model folder or a checkpoint, as lines of text or as a configuration."""

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
from megapipe.convert.weight_source import CONFIG, WeightSource
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.hf.table import TABLE
from megapipe.model.tensor_files import DTYPES, StoredTensors
from megapipe.text import count_noun


def as_configuration(
    model: ModelConfig, *, tokenizer: str | None = None, load: StorageLocation | None = None
) -> str:
    """Return a YAML configuration for train.py. `model` is the section model, without settings that
    have default values, `tokenizer` is data.tokenizer, and `load` is checkpoint.load."""
    fields = _changed(model)
    for name in ("rope", "moe"):
        if name in fields:
            fields[name] = _changed(getattr(model, name))
    tree: dict[str, Any] = {"model": fields}
    if tokenizer is not None:
        tree["data"] = {"tokenizer": tokenizer}
    if load is not None:
        tree["checkpoint"] = {"load": str(load)}
    return strict_yaml.dump(tree)


def _changed(section: Section) -> dict[str, Any]:
    """Return the fields with values that differ from the defaults."""
    return {
        name: getattr(section, name)
        for name, info in type(section).model_fields.items()
        if getattr(section, name) != info.get_default(call_default_factory=True)
    }


def line_of_balance(model: ModelConfig) -> str | None:
    """Describe the auxiliary loss coefficient; None if it is the default or without experts."""
    balance, usual = model.moe.aux_loss_coeff, MoEConfig().aux_loss_coeff
    if model.moe.num_experts is None or balance == usual:
        return None
    return (
        f"the {CONFIG} says that the model is trained with "
        f"model.moe.aux_loss_coeff={balance:g}: a run that does not set it uses {usual:g}"
    )


def lines_of_files(files: StoredTensors) -> Iterator[str]:
    """Yield lines with the sizes and types of the tensors in a folder."""
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
        yield f"types that megapipe does not read: {', '.join(odd)}"


def lines_of_folder(folder: HuggingFaceFolder) -> Iterator[str]:
    """Yield lines with the family and the sizes of a Hugging Face model."""
    row, model = folder.row, folder.model
    yield f"{folder.path}: {row.model_type} ({row.model_class})"
    yield from lines_of_files(folder.files)
    yield _sizes(model, sum(prod(shape) for shape in folder.shapes().values()))
    if (line := line_of_balance(model)) is not None:
        yield line


def lines_of_source(source: WeightSource, kind: str) -> Iterator[str]:
    """Yield lines with the path and the sizes of a model. `kind`: printed name of its format."""
    yield f"{source.path}: {kind}"
    yield _sizes(source.model, sum(prod(shape) for shape in source.shapes().values()))


def lines_of_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines about a checkpoint: origin, sizes, and Hugging Face classes for its export."""
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
        yield f"adapters of rank {lora.rank} on {', '.join(lora.targets)}"
    model = stored_model(manifest.config)
    if model.source is not None:
        yield f"model.source={model.source} is a user model: no Hugging Face class expresses it"
        return
    yield _sizes(model, sum(prod(entry.shape) for entry in weights.values()))
    fitting = [name for name, row in TABLE.items() if not list(row.misfits(model))]
    if fitting:
        yield f"Hugging Face classes that express it: {', '.join(fitting)}"
        return
    try:
        row_of(model)
    except ConfigError as error:
        yield f"no Hugging Face class expresses it: {error}"


def _sizes(model: ModelConfig, parameters: int) -> str:
    return (
        f"{parameters:,} parameters, {model.dtype}; {count_noun(model.layers, 'layer')}, hidden "
        f"{model.hidden:,}, {count_noun(model.max_positions or 0, 'position')}, vocabulary "
        f"{model.vocab_size or 0:,}, embeddings {'tied' if model.tied_embeddings else 'not tied'}"
    )
