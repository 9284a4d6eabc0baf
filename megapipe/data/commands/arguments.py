"""Command-line options that data commands share: each one sets a configuration key of `data`."""

import argparse
import typing
from functools import partial
from types import SimpleNamespace

from pydantic import ValidationError

from megapipe.command_line import Parser, suggest
from megapipe.config.data import DataConfig
from megapipe.config.keys import expected, few_values
from megapipe.config.section import documentation
from megapipe.config.unused_keys import check_effects, refuse_unused
from megapipe.data.row_keys import check_fields, unread_keys
from megapipe.data.token_file_corpus import is_token_file
from megapipe.errors import ConfigError
from megapipe.util.user_code import is_source

OF_A_CORPUS = ("source", "subset", "dataset_split", "text_field", "tokenizer_workers")


def add_keys(parser: Parser, *names: str) -> None:
    """Add an option to `parser` for each of these configuration keys of `data`."""
    for name in names:
        field = DataConfig.model_fields[name]
        kinds = {field.annotation, *typing.get_args(field.annotation)}
        option = parser.add_argument(
            _option(name),
            default=field.default,
            type=next((kind for kind in (int, float) if kind in kinds), str),
            metavar=name.rpartition("_")[2].upper(),
            help=f"{documentation(DataConfig)[name]} (default: {field.default})".replace("%", "%%"),
        )
        suggest(option, partial(few_values, field))


def data_config(given: argparse.Namespace) -> DataConfig:
    """Return the section `data` with the keys that the options set. Raises :class:`ConfigError`."""
    values = {name: value for name, value in vars(given).items() if name in DataConfig.model_fields}
    try:
        config = DataConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        words = expected(DataConfig.model_fields[key])
        raise ConfigError(f"{_option(key)} {first['input']}: expected {words}") from None
    if is_source(config.source):
        raise ConfigError(
            f"--source {config.source}: a user data set already has token ids: there is "
            "nothing to prepare"
        )
    if is_token_file(config.source):
        raise ConfigError(
            f"--source {config.source}: a token file already has token ids: there is nothing "
            "to prepare; use inspect, verify, merge or split for it"
        )
    check_effects(SimpleNamespace(data=config), "data")
    check_fields(config)
    what, unread = unread_keys(config.source, config.dataset_split)
    refuse_unused("data", config, unread, f"with data.source={config.source}, which is {what}", "")
    return config


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
