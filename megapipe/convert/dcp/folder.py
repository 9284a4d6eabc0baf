"""A DCP folder of a model's state dict, with megapipe's, Hugging Face's or torchtitan's names."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megapipe.cli import parse
from megapipe.config.model import ModelConfig
from megapipe.convert.dcp.files import DcpFiles
from megapipe.convert.dcp.titan import TitanTensors, is_titan
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.convert.weight_source import CONFIG, KIND, WeightSource
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.specs import by_name
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.hf.table import TABLE
from megapipe.model.gpt.parameters import WORD_EMBEDDING, buffers, known, stage_parameters
from megapipe.model.partition import StageSpec
from megapipe.model.tensor_files import StoredTensors, widest

CONFIGURATION = "config.yaml"
_OF_OPTIMIZERS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


def open_dcp(
    folder: Path, *, config: Path | None = None, prefix: str = "", trust: bool = False
) -> WeightSource:
    """Open the model in a DCP folder.

    Args:
        folder: a DCP folder, which has a file ``.metadata``.
        config: a Hugging Face ``config.json`` or the folder with it, or a YAML configuration whose
            section `model` describes the model; default: such a file in `folder`.
        prefix: prefix of the names of the model's tensors, if other state was saved too. Without a
            prefix, states of an optimizer and the like are recognized by their usual names and
            skipped.
        trust: whether the index, which is pickled, may run code.

    Raises:
        ConfigError: there is no config, or megapipe cannot express it.
        CheckpointError: the index is missing, damaged or not trusted; a tensor is missing,
            unexpected, or of another shape or type.
    """
    files = DcpFiles.open(folder, prefix=prefix, trust=trust)
    for name in [name for name in files.tensors if name.startswith(_OF_OPTIMIZERS)]:
        del files.tensors[name]
    if not files.tensors:
        beginning = f" that begins with {prefix!a}" if prefix else ""
        raise CheckpointError(f"{folder} has no tensor{beginning}")
    found = _config_of(folder, config)
    if found.suffix in (".yaml", ".yml"):
        model = _own_model(found)
        if WORD_EMBEDDING in files.tensors:
            return NativeTensors(folder, model, files)
        model_type = row_of(model).model_type
    else:
        model_type, model = read_model(found.parent if found.is_file() else found)
        if WORD_EMBEDDING in files.tensors:
            return NativeTensors(folder, model, files)
    if is_titan(files.tensors):
        titan = TitanTensors(files, known(model.head_dim))
        return HuggingFaceFolder(folder, TABLE[model_type], model, titan)
    return HuggingFaceFolder(folder, TABLE[model_type], model, files)


class NativeTensors:
    """A :class:`WeightSource` of stored tensors that have megapipe's names and global shapes."""

    def __init__(self, path: Path, model: ModelConfig, files: StoredTensors) -> None:
        self.path = path
        whole = StageSpec(embedding=True, layers=range(model.layers), head=True)
        specs = by_name(stage_parameters(model, whole))
        self._shapes = {f"{KIND}{name}": spec.shape for name, spec in specs.items()}
        self._shapes |= buffers(model)
        shapes = {name.removeprefix(KIND): shape for name, shape in self._shapes.items()}
        for name in sorted(shapes.keys() | files.tensors.keys()):
            wanted = list(shapes[name]) if name in shapes else "none of that name"
            found = list(files.tensors[name].shape) if name in files.tensors else "none"
            if wanted != found:
                raise CheckpointError(f"{path}: tensor {name} is {found}; the model has {wanted}")
        self._files = files
        self.model = model.model_copy(update={"dtype": widest({files.dtype(n) for n in specs})})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, ``model/...``."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return a tensor as a new host tensor. Raises CheckpointError."""
        return self._files.read(name.removeprefix(KIND))


def _config_of(folder: Path, given: Path | None) -> Path:
    """Return the file that describes the model, or a folder with a ``config.json``."""
    if given is None:
        for name in (CONFIG, CONFIGURATION):
            if (folder / name).is_file():
                return folder / name
        raise ConfigError(
            f"{folder} has neither {CONFIG} nor {CONFIGURATION}: pass --config to describe "
            "the model"
        )
    if given.is_dir() or given.name == CONFIG or given.suffix in (".yaml", ".yml"):
        return given
    raise ConfigError(
        f"--config {given}: expected a folder with a {CONFIG}, such a file, or a YAML configuration"
    )


def _own_model(path: Path) -> ModelConfig:
    """Return the resolved model that a YAML configuration describes."""
    config = parse([str(path)]).config
    if config is None or config.model.source is not None:
        raise ConfigError(
            f"{path}: model.source is set, but this command reads only the built-in family"
        )
    if config.model.vocab_size is None:
        raise ConfigError(f"{path}: model.vocab_size is not set: set it to the embedding's rows")
    return config.model.resolved(vocab_size=None, sequence_length=config.train.sequence_length)
