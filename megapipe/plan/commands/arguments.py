"""Command-line arguments that give a configuration, in the form that train.py accepts."""

import argparse

from megapipe.cli import configured, possible_words
from megapipe.command_line import Parser, suggest
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve


def add_keys(parser: Parser, needed: str) -> None:
    """Add the arguments for a configuration. `needed`: setting that must be above 1, for --help."""
    keys = parser.add_argument(
        "keys",
        nargs="+",
        metavar="CONFIG or section.key=value",
        help=f"as for megapipe train; needs {needed} above 1",
    )
    suggest(keys, possible_words)


def add_configuration(parser: Parser) -> None:
    """Add the arguments from which :func:`configuration` makes a configuration."""
    add_keys(parser, "parallel.cp")


def configuration(given: argparse.Namespace) -> Config:
    """Return the resolved configuration, in which the vocabulary size can be unknown. Raises
    ConfigError."""
    config, _ = resolve(configured(given.keys), None, None)
    if config.parallel.cp == 1:
        raise ConfigError("parallel.cp=1 splits no positions: expected parallel.cp=2 or more")
    return config
