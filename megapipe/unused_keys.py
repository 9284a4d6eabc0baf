"""One rule for keys that have a value and no effect: they are refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megapipe.errors import ConfigError
from megapipe.section import Section
from megapipe.strict_yaml import text_of


def refuse_unused(
    name: str, section: Section, keys: Sequence[str], why: str, instead: str = ", or that"
) -> None:
    """Refuse those of `keys` that have another value than their default, all of them in one line.

    Keys that only say where files are kept or how many processes work (`data.cache`,
    `data.workers`) are taken everywhere, so that one machine has one file of settings.

    Args:
        name: the section's, as users write it, such as "model.moe".
        keys: those of the section that have no effect as it stands.
        why: what is missing for it, or stands against it: "without model.window".
        instead: the end of the line, behind the default.

    Raises:
        ConfigError: one of them has a value.
    """
    unused = given(section, keys)
    if unused:
        has = f"{with_values(name, section, unused)} {'has' if len(unused) == 1 else 'have'}"
        usual = " and ".join(text_of(_default(section, key)) for key in unused)
        raise ConfigError(f"{has} no effect {why}: expected {usual}{instead}")


def given(section: Section, keys: Iterable[str]) -> list[str]:
    """Those of `keys` that have another value than their default."""
    return [key for key in keys if getattr(section, key) != _default(section, key)]


def with_values(name: str, section: Section, keys: Iterable[str]) -> str:
    """Keys of the section `name` with their values, as an error begins."""
    return ", ".join(f"{name}.{key}={text_of(getattr(section, key))}" for key in keys)


def _default(section: Section, key: str) -> Any:
    return type(section).model_fields[key].get_default(call_default_factory=True)
