"""Paths and names on a hub told apart, for corpora and tokenizers."""

import re
from pathlib import Path
from typing import Literal

from megapipe.errors import DataError
from megapipe.words import one_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REQUEST_TIMEOUT_S = 10.0


def is_hub_name(name: str, file_suffixes: tuple[str, ...]) -> bool:
    """Whether `name` has the form of a name on the Hugging Face hub: ``name`` or ``owner/name``.

    A name that ends in one of `file_suffixes` is taken for a path.
    """
    return _HUB_NAME.fullmatch(name) is not None and not name.lower().endswith(file_suffixes)


def check_reachable(what: str, name: str, repo_type: Literal["model", "dataset"]) -> None:
    """One request to the hub, so that a wrong name or a missing network is reported in seconds.

    The libraries that load from the hub repeat a failed request for most of a minute. Raises
    :class:`DataError` if the request fails.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=_REQUEST_TIMEOUT_S)
    except Exception as error:
        raise DataError(
            f"{what} {name!r}: no such file or folder in {Path.cwd()}, and not to be had from the "
            f"Hugging Face hub ({one_line(error)})"
        ) from error
