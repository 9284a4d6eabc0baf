"""Names that are URLs, as names alone: nothing is opened here."""

from megapipe.errors import ConfigError
from megapipe.words import without_user_info


def is_remote(source: str) -> bool:
    """Whether a name is a URL."""
    return "://" in source


def refuse_user_info(key: str, value: str) -> None:
    """Raise ConfigError, which does not repeat it, for a URL with a user name or a password in it:
    run folders, logs and checkpoints hold the configuration."""
    if is_remote(value) and without_user_info(value) != value:
        raise ConfigError(
            f"{key} is a URL with a user name or a password in it, which every run folder, log and "
            "checkpoint would hold: expected them in the environment or in fsspec's configuration"
        )


def check_folder(key: str, url: str) -> None:
    """Raise ConfigError for a URL that is no folder of a store."""
    refuse_user_info(key, url)
    protocol, _, path = url.partition("://")
    if not path.strip("/") or "::" in url or set(url) & set("*?[]"):
        raise ConfigError(
            f"{key}={url}: expected a protocol and a path, as in s3://bucket/path, without any of "
            "* ? [ ] ::"
        )
    if protocol in ("file", "local"):
        raise ConfigError(f"{key}={url}: expected a path, not a URL, for a local folder")
