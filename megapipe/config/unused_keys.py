"""One rule for keys that have a value and no effect: they are refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, get_args

from megapipe.config.section import Section, needs_of, sections_within
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.words import together

AUTO = "auto"


def check_effects(config: Any, *sections: str) -> None:
    """Refuse keys that lack what they need, all that lack the same thing in one line.

    Args:
        config: the configuration as given, or an object with those of its sections that the keys
            in question need.
        sections: dotted names of those whose keys are looked at, without sections within them; all
            of the configuration's by default.

    Raises:
        ConfigError: keys have a value, other than an ``auto`` that leaves a choice to the program,
            and no effect.
    """
    lacking: dict[str, list[str]] = {}
    for name in sections or [name for name, _ in sections_within(type(config))]:
        section = _value(config, name)
        kind: type[Section] = type(section)
        needed = needs_of(kind)
        for key in given(section, needed):
            if getattr(section, key) == AUTO and _takes_auto(kind.model_fields[key].annotation):
                continue
            for need in needed[key]:
                if not need.is_met(config):
                    lacking.setdefault(need.words, []).append(f"{name}.{key}")
    for words, keys in lacking.items():
        refuse_unused("", config, keys, f"without {words}")


def _takes_auto(annotation: Any) -> bool:
    return any(part == AUTO or _takes_auto(part) for part in get_args(annotation))


def refuse_unused(
    name: str,
    section: Any,
    keys: Iterable[str],
    why: str,
    instead: str = ", or that",
    *,
    right: str | None = None,
) -> None:
    """Refuse those of `keys` that have another value than their default, all of them in one line.

    Which keys are taken without an effect, and why, is in docs/decisions/layout.md.

    Args:
        name: the section's, as users write it, such as "model"; "" for the whole configuration.
        section: the section, or the whole configuration, or an object with some of its sections.
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
        usual = together([_shown(_default(section, key)) for key in unused])
        raise ConfigError(f"{has} no effect {why}: expected {right or f'{usual}{instead}'}")


def given(section: Any, keys: Iterable[str]) -> list[str]:
    """List the `keys` that have another value than their default."""
    return [key for key in keys if _value(section, key) != _default(section, key)]


def _shown(default: Any) -> str:
    return "none" if default == {} else text_of(default)


def _with_values(before: str, section: Any, keys: Iterable[str]) -> Iterator[str]:
    """Yield keys behind `before` with their values, those of a mapping one by one."""
    for key in keys:
        value = _value(section, key)
        if isinstance(value, Mapping):
            yield from (f"{before}{key}.{name}={text_of(each)}" for name, each in value.items())
        else:
            yield f"{before}{key}={text_of(value)}"


def _value(section: Any, key: str) -> Any:
    return reduce(_within, key.split("."), section)


def _default(section: Any, key: str) -> Any:
    *path, last = key.split(".")
    inner = reduce(_within, path, section)
    return type(inner).model_fields[last].get_default(call_default_factory=True)


def _within(section: Any, key: str) -> Any:
    return section[key] if isinstance(section, Mapping) else getattr(section, key)
