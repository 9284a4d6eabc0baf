"""Names that are URLs, as names alone: nothing is opened here."""

import re

from megapipe.errors import ConfigError
from megapipe.words import REDACTED, without_secrets, without_user_info

_URL = re.compile(r"[\w.+-]+:/\S.*", re.DOTALL)
_TEMPLATES = re.compile(r"(^|::)reference:")
"""fsspec's files that are made by templates of jinja, in some versions without a sandbox."""


def is_remote(source: str) -> bool:
    """Whether a name is a URL."""
    return "://" in source


def without_query(path: str) -> str:
    """A URL of a web server without the query, which says what is asked for and by whom; anything
    else as it is."""
    return re.split("[?#]", path)[0] if path.startswith(("http://", "https://")) else path


def check_url(key: str, value: str) -> None:
    """Raise ConfigError for a URL that cannot be used, or not without its secrets being told.

    Run folders, logs and checkpoints hold the configuration, in which URLs are without their
    queries. A user name or a password in a URL is an error, which does not repeat it.
    """
    if not is_remote(value):
        return
    if without_user_info(value) != value:
        raise ConfigError(
            f"{key} is a URL with a user name or a password in it, which every run folder, log and "
            "checkpoint would hold: expected them in the environment or in fsspec's configuration"
        )
    if _TEMPLATES.search(value):
        raise ConfigError(f"{key}={value}: reference: is not opened: its templates may run code")
    if not _URL.fullmatch(value):
        return
    if REDACTED in (written := without_secrets(value)) and not written.endswith(REDACTED):
        raise ConfigError(
            f"{key} is a URL whose query cannot be told from the text around it: expected spaces "
            "as %20 in it, and no quote, bracket or punctuation at its end"
        )


def check_folder(key: str, url: str) -> None:
    """Raise ConfigError for a URL that is no folder of a store."""
    check_url(key, url)
    protocol, _, path = url.partition("://")
    if not path.strip("/") or "::" in url or set(url) & set("*?[]"):
        raise ConfigError(
            f"{key}={url}: expected a protocol and a path, as in s3://bucket/path, without any of "
            "* ? [ ] ::"
        )
    if protocol in ("file", "local"):
        raise ConfigError(f"{key}={url}: expected a path, not a URL, for a local folder")
