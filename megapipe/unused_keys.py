"""One rule for keys that have a value and no effect: they are refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from megapipe.errors import ConfigError
from megapipe.section import Section
from megapipe.strict_yaml import text_of
from megapipe.words import together

Need = tuple[Sequence[str], bool, str]
"""Keys, whether they have an effect, and what they need for it: "model.window"."""


def refuse_without(name: str, section: Section, needs: Iterable[Need]) -> None:
    """Refuse keys that lack what they need, as :func:`refuse_unused` does."""
    for keys, has_effect, needed in needs:
        if not has_effect:
            refuse_unused(name, section, keys, f"without {needed}")


def refuse_unused(
    name: str,
    section: Section,
    keys: Iterable[str],
    why: str,
    instead: str = ", or that",
    *,
    right: str | None = None,
) -> None:
    """Refuse those of `keys` that have another value than their default, all of them in one line.

    Which keys are taken without an effect, and why, is in docs/decisions/layout.md.

    Args:
        name: the section's, as users write it, such as "model.moe"; "" for the whole configuration.
        section: the section, or the whole configuration.
        keys: those of the section that have no effect as it stands; dotted where they are in
            sections within it.
        why: what is missing for it, or stands against it: "without model.window".
        instead: the end of the line, behind the defaults.
        right: what is expected, in words; None: the defaults, and `instead`.

    Raises:
        ConfigError: one of them has a value.
    """
    unused = given(section, keys)
    if unused:
        shown = list(_with_values(f"{name}." if name else "", section, unused))
        has = f"{', '.join(shown)} {'has' if len(shown) == 1 else 'have'}"
        usual = together([text_of(_default(section, key)) for key in unused])
        raise ConfigError(f"{has} no effect {why}: expected {right or f'{usual}{instead}'}")


def given(section: Section, keys: Iterable[str]) -> list[str]:
    """Those of `keys` that have another value than their default."""
    return [key for key in keys if _value(section, key) != _default(section, key)]


def _with_values(before: str, section: Section, keys: Iterable[str]) -> Iterator[str]:
    """Yield keys behind `before` with their values, those of a mapping one by one."""
    for key in keys:
        value = _value(section, key)
        if isinstance(value, Mapping):
            yield from (f"{before}{key}.{name}={text_of(each)}" for name, each in value.items())
        else:
            yield f"{before}{key}={text_of(value)}"


def _value(section: Section, key: str) -> Any:
    return reduce(_within, key.split("."), section)


def _default(section: Section, key: str) -> Any:
    *path, last = key.split(".")
    inner = reduce(_within, path, section)
    return type(inner).model_fields[last].get_default(call_default_factory=True)


def _within(section: Any, key: str) -> Any:
    return section[key] if isinstance(section, Mapping) else getattr(section, key)
