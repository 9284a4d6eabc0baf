"""The configuration that commands are given, as train.py takes it."""

import argparse

from megapipe.cli import parse, possible_words
from megapipe.command_line import Parser, suggest
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve


def add_keys(parser: Parser, needed: str) -> None:
    """Add a configuration, in which something is needed."""
    keys = parser.add_argument(
        "keys",
        nargs="+",
        metavar="CONFIG or section.key=value",
        help=f"as train.py takes them; {needed} above 1 is needed",
    )
    suggest(keys, possible_words)


def add_configuration(parser: Parser) -> None:
    """Add the argument of :func:`configuration`."""
    add_keys(parser, "parallel.cp")


def configuration(given: argparse.Namespace) -> Config:
    """The resolved configuration; its vocabulary does not matter here. Raises
    :class:`ConfigError`."""
    config, _ = resolve(parse(given.keys).config, None, None)
    if config.parallel.cp == 1:
        raise ConfigError("parallel.cp=1 splits no positions: expected parallel.cp=2 or more")
    return config
