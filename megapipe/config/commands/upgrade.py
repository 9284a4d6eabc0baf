"""Rewrite configurations of version 0.1: keys get their current names, and comments are kept. A
file without old names is not changed.

example: megapipe config upgrade my_run.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.config.strict_yaml import YamlError
from megapipe.config.upgrade import upgrade
from megapipe.errors import ConfigError
from megapipe.text import printable

PURPOSE = "replace old key names in configuration files"


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="configuration in YAML")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with code 2 if a file has old names",
    )


def run(given: argparse.Namespace) -> None:
    """Rewrite the files. Raises :class:`ConfigError` for a file that is not a configuration, or
    cannot be read or written."""
    old = []
    for path in given.files:
        name = printable(str(path))
        try:
            text, names = upgrade(path.read_bytes().decode("utf-8-sig"))
            if names and not given.check:
                path.write_text(text, encoding="utf-8", newline="")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{name}: {reason}") from None
        except YamlError as error:
            raise ConfigError(f"{name}:{error.line or 1}: {error}") from None
        for key, current in names.items():
            change = f"is {current}" if current else "had no effect and is removed"
            print(f"{name}: {key} {change}")
        old += [name] if names else []
        if not names:
            print(f"{name}: no old names")
    if old and given.check:
        raise ConfigError(
            f"{', '.join(old)}: old names of keys; megapipe config upgrade rewrites them"
        )
