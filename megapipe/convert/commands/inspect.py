"""Shows the content of a checkpoint or of a folder of Hugging Face, Megatron-LM or
torch.distributed.checkpoint (DCP), and which parts a conversion cannot express. With --config it
prints a configuration that continues training from the weights; a folder of Megatron-LM or DCP must
be converted first.

example: convert.py inspect Qwen/Qwen3-0.6B --config > qwen.yaml
         train.py qwen.yaml data.source=texts
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from megapipe.checkpoint.find import find_checkpoint
from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.command_line import Parser
from megapipe.convert.commands.arguments import add_trust, be_quiet
from megapipe.convert.dcp import METADATA
from megapipe.convert.describe import (
    as_configuration,
    line_of_balance,
    lines_of_checkpoint,
    lines_of_files,
    lines_of_folder,
    lines_of_source,
)
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.convert.import_model import has_tokenizer
from megapipe.convert.megatron.layout import is_megatron
from megapipe.convert.weight_source import CONFIG
from megapipe.errors import ConfigError
from megapipe.model.hub import local_folder
from megapipe.model.tensor_files import TensorFiles
from megapipe.text import print_folded

PURPOSE = "show what a model folder or a checkpoint contains"


def add(parser: Parser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a folder of Hugging Face, Megatron-LM or DCP, a name on the hub, a "
        "checkpoint, or a run folder",
    )
    parser.add_argument("--config", action="store_true", help="print only a configuration (YAML)")
    add_trust(parser)


def run(given: argparse.Namespace) -> None:
    be_quiet()
    path = local_folder(given.path)
    if is_megatron(path) and not (path / CONFIG).exists():
        _megatron(path, given.config, trust=given.trust_pickle)
    elif (path / METADATA).exists():
        _dcp(path, given.config, trust=given.trust_pickle)
    elif (path / CONFIG).exists():
        _folder(path, given.config)
    else:
        _checkpoint(find_checkpoint(path, verify=False), given.config)


def _folder(path: Path, config: bool) -> None:
    try:
        folder = HuggingFaceFolder.open(path)
    except ConfigError:  # its contents may be of interest anyway
        if not config:
            print_folded(*lines_of_files(TensorFiles.open(path)))
        raise
    name = str(path.absolute()) if has_tokenizer(path) else None
    text = as_configuration(folder.model, tokenizer=name, load=path.absolute())
    line = line_of_balance(folder.model)
    _show(lines_of_folder(folder), text if line is None else f"# {line}\n{text}", config)


def _megatron(path: Path, config: bool, *, trust: bool) -> None:
    from megapipe.convert.megatron.folder import MegatronFolder

    folder = MegatronFolder.open(path, trust=trust)
    lines = lines_of_source(folder, f"Megatron-LM, {folder.shards.form}")
    _show(lines, as_configuration(folder.model), config)


def _dcp(path: Path, config: bool, *, trust: bool) -> None:
    from megapipe.convert.dcp.files import DcpFiles
    from megapipe.convert.dcp.folder import open_dcp

    try:
        source = open_dcp(path, trust=trust)
    except ConfigError:  # its contents may be of interest anyway
        if not config:
            print_folded(*lines_of_files(DcpFiles.open(path, trust=trust)))
        raise
    lines = lines_of_source(source, "torch.distributed.checkpoint")
    _show(lines, as_configuration(source.model), config)


def _checkpoint(checkpoint: Checkpoint, config: bool) -> None:
    stored, path = checkpoint.manifest.config, checkpoint.path
    text = as_configuration(
        stored_model(stored),
        tokenizer=str(stored["data.tokenizer"]),
        load=path.absolute() if isinstance(path, Path) else path,
    )
    _show(lines_of_checkpoint(checkpoint), text, config)


def _show(lines: Iterable[str], text: str, config: bool) -> None:
    if not config:
        print_folded(*lines)
    print(text, end="")
