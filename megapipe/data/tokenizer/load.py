"""Loading of a tokenizer by name."""

from pathlib import Path
from typing import Any

from megapipe.command_line import phase
from megapipe.data.tokenizer import of_tiktoken
from megapipe.data.tokenizer.byte import ByteTokenizer
from megapipe.data.tokenizer.hugging_face import FastTokenizer, of_transformers
from megapipe.data.tokenizer.interface import Tokenizer
from megapipe.errors import DataError
from megapipe.text import one_line
from megapipe.util.hub import check_reachable, is_hub_name
from megapipe.util.paths import exists, is_file, user_path


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with the name `name`, as in ``data.tokenizer``.

    The name is ``byte``, a tokenizer.json, a folder that `transformers` can load,
    ``tiktoken:NAME``, or a name on the Hugging Face hub (a local copy is used if there is one).
    Code that comes with a tokenizer is never run.

    Raises:
        DataError: the tokenizer does not exist, cannot be loaded, or has no EOS token.
    """
    if name == "byte":
        return ByteTokenizer()
    if name.startswith(of_tiktoken.PREFIX):
        return of_tiktoken.load(name)
    path = user_path(name)
    if not exists(path) and not is_hub_name(name, (".json", ".model")):
        raise DataError(f"tokenizer {name!r}: no such file or folder (from {Path.cwd()})")
    try:
        if is_file(path):
            from tokenizers import Tokenizer as Backend

            return FastTokenizer(Backend.from_file(str(path)), name)
        return of_transformers(_auto(name, path), name)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"tokenizer {name!r}: cannot be loaded ({one_line(error)})") from error


def _auto(name: str, path: Path) -> Any:
    """Load a tokenizer with `transformers`, from a folder or by its name on the hub."""
    with phase("loading transformers"):
        from transformers import AutoTokenizer

    def load(source: str, *, local: bool) -> Any:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=local
        )

    if exists(path):
        return load(str(path), local=True)
    try:
        return load(name, local=True)
    except OSError:  # no local copy
        check_reachable("tokenizer", name, "model")
        return load(name, local=False)
