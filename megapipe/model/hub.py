"""Finds local model folders, and downloads models from the Hugging Face hub."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megapipe.errors import CheckpointError, DataError
from megapipe.model.tensor_files import INDEX, SINGLE
from megapipe.text import one_line
from megapipe.util.hub import check_reachable, is_hub_name
from megapipe.util.paths import exists, is_folder, user_path

FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
"""Patterns of files to fetch: weights, configs and tokenizers, nothing pickled or executable."""


def local_folder(name: str) -> Path:
    """Return the folder `name`, or a local copy of the model `name` on the Hugging Face hub.

    Raises:
        CheckpointError: there is no such folder, and the hub lacks the model or cannot be reached.
    """
    path = user_path(name)
    if is_folder(path):
        return path
    if exists(path) or not is_hub_name(name, (".safetensors", ".json", ".bin")):
        raise CheckpointError(f"{name}: no such folder: expected a folder, or a name on the hub")
    from huggingface_hub import snapshot_download

    def fetch(*, local: bool) -> Path:
        found = snapshot_download(name, allow_patterns=list(FILES), local_files_only=local)
        return Path(found)

    with contextlib.suppress(OSError):  # no local copy
        copy = fetch(local=True)
        if any((copy / file).is_file() for file in (SINGLE, INDEX)):  # not only a tokenizer's
            return copy
    try:
        check_reachable("model", name, "model")
        return fetch(local=False)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # whatever the connection or the hub raises
        raise CheckpointError(f"{name} cannot be downloaded ({one_line(error)})") from error
