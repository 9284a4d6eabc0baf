"""Paths and names on a hub told apart, for corpora and tokenizers."""

import re
from pathlib import Path
from typing import Literal

from megapipe.errors import DataError
from megapipe.util.retries import Failed, ask, is_answered_later
from megapipe.words import one_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REQUEST_TIMEOUT_S = 10.0


def is_hub_name(name: str, file_suffixes: tuple[str, ...]) -> bool:
    """Whether `name` has the form of a name on the Hugging Face hub: ``name`` or ``owner/name``.

    A name that ends in one of `file_suffixes` is taken for a path.
    """
    return _HUB_NAME.fullmatch(name) is not None and not name.lower().endswith(file_suffixes)


def check_reachable(what: str, name: str, repo_type: Literal["model", "dataset"]) -> None:
    """Ask the hub for a name, so that a wrong one or a missing network is reported in seconds.

    The libraries that load from the hub repeat a failed request for most of a minute. Here one is
    repeated that the hub cannot answer now (:mod:`megapipe.util.retries`). Raises
    :class:`DataError` if it fails.
    """
    from huggingface_hub import HfApi

    def look() -> None:
        try:
            HfApi().repo_info(name, repo_type=repo_type, timeout=_REQUEST_TIMEOUT_S)
        except Exception as error:
            if is_answered_later(error):
                raise
            raise LookupError(one_line(error)) from error  # which is not repeated

    try:
        ask(f"look for {name} on the Hugging Face hub", look)
    except Failed as failed:
        error = failed.cause
        raise DataError(
            f"{what} {name!r}: no such file or folder in {Path.cwd()}, and not to be had from the "
            f"Hugging Face hub ({one_line(error)})"
        ) from failed
