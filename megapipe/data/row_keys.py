"""Checks of the configuration keys of `data` that choose texts of a source and fields of rows."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.config.data import EXAMPLES, DataConfig
from megapipe.config.unused_keys import refuse_unused
from megapipe.data.corpus.compressed import inner_suffix
from megapipe.data.corpus.files import OF_ROWS, is_saved_data_set, is_standard_library
from megapipe.data.token_file_corpus import TEXT_KEYS, is_token_file
from megapipe.errors import ConfigError
from megapipe.util.paths import is_file, is_folder, user_path

SUPERVISED = EXAMPLES.words


def check_fields(data: DataConfig) -> None:
    """Raise :class:`ConfigError` if ``data.sample_format=supervised`` and a `text_field` is set:
    the rows then have the fields of examples instead."""
    if data.sample_format == "supervised":
        fields = ["text_field", *(f"mixture.{name}.text_field" for name in data.mixture)]
        refuse_unused("data", data, fields, f"with {SUPERVISED}", "")


def unread_keys(source: str, dataset_split: str | None) -> tuple[str, Sequence[str]]:
    """Describe a source of texts, and return the keys that do not apply to it.

    The keys are some of :data:`~megapipe.data.token_file_corpus.TEXT_KEYS`; [] if the kind of
    source is unknown.
    """
    if is_token_file(source):
        return "a token file", TEXT_KEYS
    if is_standard_library(source):
        return "Python's standard library", TEXT_KEYS
    path = user_path(source)
    if is_folder(path) and is_saved_data_set(path):
        return "a saved data set", ["subset"]
    if dataset_split is not None:  # whatever it is, `datasets` reads it
        return "a data set", []
    if is_file(path) and inner_suffix(path) not in OF_ROWS:
        return "a text file", ["subset", "text_field"]
    return "texts", ["subset"] if is_file(path) or is_folder(path) else []


def no_rows(key: str, source: str) -> ConfigError:
    """Return the error for a source of examples that has no rows."""
    return ConfigError(
        f"{SUPERVISED}, and {key}={source} has no rows: expected JSON, parquet or a "
        "data set, with fields of messages, or of prompt and completion"
    )
