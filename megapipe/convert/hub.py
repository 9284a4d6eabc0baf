"""Folders of models: local ones, or copies of those on the Hugging Face hub."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megapipe.convert.tensor_files import INDEX, SINGLE
from megapipe.data.hub import check_reachable, is_hub_name
from megapipe.errors import CheckpointError, DataError
from megapipe.util.paths import exists, is_folder, user_path
from megapipe.words import one_line

FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
"""Files that are fetched: weights, configs and tokenizers, and nothing that is pickled or run."""


def local_folder(name: str) -> Path:
    """The folder that `name` is, or a local copy of what the hub has under that name.

    Raises:
        CheckpointError: there is no such folder, and the hub has none or cannot be reached.
    """
    path = user_path(name)
    if is_folder(path):
        return path
    if exists(path) or not is_hub_name(name, (".safetensors", ".json", ".bin")):
        raise CheckpointError(f"{name}: no such folder; expected one, or a name on the hub")
    from huggingface_hub import snapshot_download

    def fetch(*, local: bool) -> Path:
        found = snapshot_download(name, allow_patterns=list(FILES), local_files_only=local)
        return Path(found)

    with contextlib.suppress(OSError):  # no local copy
        copy = fetch(local=True)
        if any((copy / file).is_file() for file in (SINGLE, INDEX)):  # not of a tokenizer alone
            return copy
    try:
        check_reachable("model", name, "model")
        return fetch(local=False)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # whatever the connection or the hub brings up
        raise CheckpointError(f"{name}: cannot be fetched ({one_line(error)})") from error
