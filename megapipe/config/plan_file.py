"""Files with keys of the section `plan`: what a calibration and the doctor's link test write, and
``megapipe plan --calibration`` and ``--links`` read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapipe.config import strict_yaml
from megapipe.config.strict_yaml import YamlError
from megapipe.errors import ConfigError
from megapipe.util.no_symlinks import write_no_symlinks

SECTION = "plan"


def plan_words(path: Path) -> list[str]:
    """Return the keys of a file as words of a command line.

    Raises:
        ConfigError: no such file, not YAML, or keys of another section.
    """
    try:
        entries = strict_yaml.parse_mapping(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a file with the section {SECTION}: {error}") from None
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from None
    for entry in entries:
        if not entry.key.startswith(f"{SECTION}."):
            raise ConfigError(f"{path}: {entry.key}: expected only keys of the section {SECTION}")
    return [f"{entry.key}={strict_yaml.text_of(entry.value)}" for entry in entries]


def write_plan_file(path: Path, origin: str, keys: Mapping[str, Any]) -> None:
    """Write keys of the section, below a comment that says where they come from.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_no_symlinks(
            path.parent, path.name, f"# {origin}\n{strict_yaml.dump({SECTION: {**keys}})}"
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
