"""Checks of URLs in configurations, as texts: no URL is opened."""

import re

from megapipe.errors import ConfigError
from megapipe.text import REDACTED, without_secrets, without_user_info

_URL = re.compile(r"[\w.+-]+:/\S.*", re.DOTALL)
_TEMPLATES = re.compile(r"(^|::)reference:")
"""Pattern of URLs of fsspec's "reference" file system. Its files hold jinja templates, which some
fsspec versions run without a sandbox."""


def is_remote(source: str) -> bool:
    """Whether a name is a URL."""
    return "://" in source


def without_query(path: str) -> str:
    """Return a web server's URL without the query, which may hold secrets; return other names
    unchanged."""
    return re.split("[?#]", path)[0] if path.startswith(("http://", "https://")) else path


def check_url(key: str, value: str) -> None:
    """Raise ConfigError if `value`, the value of configuration key `key`, is a URL that cannot be
    used, or that holds a user name or a password. The error text does not show these.

    Run folders, logs and checkpoints hold the configuration, but without the queries of URLs. So a
    URL may hold secrets only in its query.
    """
    if not is_remote(value):
        return
    if without_user_info(value) != value:
        raise ConfigError(
            f"{key} is a URL with a user name or password, which would be copied into run "
            "folders, logs and checkpoints: put them into the environment or fsspec's "
            "configuration"
        )
    if _TEMPLATES.search(value):
        raise ConfigError(f"{key}={value}: reference: is refused: its templates may run code")
    if not _URL.fullmatch(value):
        return
    if REDACTED in (written := without_secrets(value)) and not written.endswith(REDACTED):
        raise ConfigError(
            f"{key} is a URL whose end is ambiguous: write spaces as %20, and no quote, "
            "bracket or punctuation at its end"
        )


def check_folder(key: str, url: str) -> None:
    """Raise ConfigError if `url`, the value of `key`, cannot be a folder of an object store."""
    check_url(key, url)
    protocol, _, path = url.partition("://")
    if not path.strip("/") or "::" in url or set(url) & set("*?[]"):
        raise ConfigError(
            f"{key}={url}: expected a protocol and a path, as in s3://bucket/path, without any of "
            "* ? [ ] ::"
        )
    if protocol in ("file", "local"):
        raise ConfigError(f"{key}={url}: expected a path, not a URL, for a local folder")
