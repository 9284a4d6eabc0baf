"""Export of a checkpoint as a DCP folder by one process, one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.convert.adapters import Adapters
from megapipe.convert.atomic_folder import atomic_folder
from megapipe.convert.dcp.folder import CONFIGURATION
from megapipe.convert.describe import as_configuration
from megapipe.convert.export import ExportedWeights, class_of_run, write_config
from megapipe.convert.weight_source import KIND
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.hf.config import has_class
from megapipe.model.gpt.hf.weights import TensorMapping
from megapipe.model.gpt.parameters import WORD_EMBEDDING, buffers
from megapipe.util.dtypes import Dtype

Names = Literal["hf", "megapipe"]


def export_dcp(
    checkpoint: Checkpoint,
    output: Path,
    *,
    names: Names | None = None,
    dtype: Dtype | None = None,
    model_type: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the weights of `checkpoint`, of any layout, to a new folder `output`.

    With `names` hf the folder has the state dict of the class that expresses the model (with the
    head even if it is tied) and the class's ``config.json``; with `names` megapipe it has
    megapipe's global tensors and a ``config.yaml``. Default: hf if a class expresses the model.
    ``torch.distributed.checkpoint.load`` reads the folder into a state dict of the same names, on
    any number of ranks. `dtype` is the type of the weights (default: the model's), `model_type` the
    class (default: the first that expresses the model). `report` is called with lines of progress.

    Raises:
        ConfigError: the class `model_type` cannot express the model, or with `names` hf no class
            can.
        CheckpointError: the checkpoint is damaged, `dtype` cannot hold a value, or `output` exists.
    """
    if names is None:
        named_by_class = model_type is not None or has_class(stored_model(checkpoint.config))
        names = "hf" if named_by_class else "megapipe"
        if not named_by_class:
            report("no Hugging Face class can express the model: tensors have megapipe's names")
    if names == "hf":
        row = class_of_run(checkpoint, model_type)
        weights = ExportedWeights.of_class(checkpoint, row, dtype, in_files=False)
        head = f"{row.modules['head']}.weight"
        tied = weights.model.tied_embeddings
    else:
        weights = _own(checkpoint, dtype)
        tied = False
    named = weights.named()
    kind = TORCH_DTYPES[weights.dtype]
    if tied:
        shape = next(e.shape for e in weights.entries if e.name == WORD_EMBEDDING)
        named.append((head, shape, weights.dtype))
    state = {
        name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
        for name, shape, dtype in named
    }

    def values() -> Iterator[tuple[str, Tensor]]:
        yield from weights.values()
        if tied:
            yield head, checkpoint.read(f"{KIND}{WORD_EMBEDDING}").to(kind)

    with atomic_folder(output) as folder:
        if names == "hf":
            write_config(folder, row, weights)
        else:
            model = weights.model.model_copy(update={"dtype": weights.dtype})
            (folder / CONFIGURATION).write_text(as_configuration(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that only one process writes: it is intended
            save_state_dict(
                state,
                # the writer holds a file's tensors until it closes it, so each has a file
                storage_writer=FileSystemWriter(
                    folder, single_file_per_rank=False, per_thread_copy_ahead=0
                ),
                planner=_Streaming(values()),
                no_dist=True,
            )
    report(f"{len(named):,} tensors")


def _own(checkpoint: Checkpoint, dtype: Dtype | None) -> ExportedWeights:
    """Return the checkpoint's global tensors under megapipe's names; adapters are not merged."""
    model = stored_model(checkpoint.config)
    beside = buffers(model)
    found = [
        TensorMapping(
            name.removeprefix(KIND), e.shape, (name.removeprefix(KIND),), "same", name in beside
        )
        for name, e in checkpoint.manifest.entries.items()
        if name.startswith(KIND)
    ]
    return ExportedWeights(
        checkpoint, model, found, dtype or model.dtype, Adapters(checkpoint, model, None)
    )


class _Streaming(DefaultSavePlanner):
    """A save planner that reads each tensor when it is written; the state dict has shapes only.

    The writer must not copy tensors ahead, so that it requests them in the state dict's order.
    """

    def __init__(self, values: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: Any) -> Tensor:
        """Return the next tensor, which must be the requested one."""
        name, tensor = next(self._values)
        assert name == write_item.index.fqn, (name, write_item.index.fqn)
        return tensor.contiguous()
