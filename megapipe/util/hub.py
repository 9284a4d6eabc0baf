"""Names on the Hugging Face hub: distinguished from paths, and looked up before a download."""

import re
from pathlib import Path
from typing import Literal

from megapipe.errors import DataError
from megapipe.text import one_line
from megapipe.util.retries import Failed, ask, is_answered_later

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REQUEST_TIMEOUT_S = 10.0


def is_hub_name(name: str, file_suffixes: tuple[str, ...]) -> bool:
    """Whether `name` has the form ``name`` or ``owner/name`` of a name on the Hugging Face hub.

    A name that ends in one of `file_suffixes` is a path.
    """
    return _HUB_NAME.fullmatch(name) is not None and not name.lower().endswith(file_suffixes)


def check_reachable(what: str, name: str, repo_type: Literal["model", "dataset"]) -> None:
    """Look `name` up on the hub, so that a wrong name or a missing network is reported in seconds.

    The libraries that load from the hub retry a failed request for almost a minute. This function
    retries a request only if the hub answers that it cannot serve it now
    (:mod:`megapipe.util.retries`). `what` names the kind of object in messages. Raises
    :class:`DataError` if the hub has no such name or cannot be reached.
    """
    from huggingface_hub import HfApi

    def look() -> None:
        try:
            HfApi().repo_info(name, repo_type=repo_type, timeout=_REQUEST_TIMEOUT_S)
        except Exception as error:
            if is_answered_later(error):
                raise
            raise LookupError(one_line(error)) from error  # not repeated

    try:
        ask(f"look for {name} on the Hugging Face hub", look)
    except Failed as failed:
        error = failed.cause
        raise DataError(
            f"{what} {name!r}: no such file or folder in {Path.cwd()}, and it cannot be "
            f"downloaded from the Hugging Face hub ({one_line(error)})"
        ) from failed
