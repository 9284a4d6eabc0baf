"""Refuses keys that are set but have no effect, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, get_args

from megapipe.config.section import Section, needs_of, sections_within
from megapipe.config.strict_yaml import text_of
from megapipe.errors import ConfigError
from megapipe.text import together

AUTO = "auto"


def check_effects(config: Any, *sections: str) -> None:
    """Refuse keys that are set although a condition that they need does not hold.

    Keys that lack the same condition are refused in one line.

    Args:
        config: the configuration as given, or an object with the sections that the keys need.
        sections: dotted names of the sections to check, without sections within them; default: all.

    Raises:
        ConfigError: a key is set and has no effect. Keys set to ``auto`` are accepted if that value
            leaves a choice to the program.
    """
    lacking: dict[str, list[str]] = {}
    for name in sections or [name for name, _ in sections_within(type(config))]:
        section = _value(config, name)
        kind: type[Section] = type(section)
        needed = needs_of(kind)
        for key in given(section, needed):
            if getattr(section, key) == AUTO and _takes_auto(kind.model_fields[key].annotation):
                continue
            for words in dict.fromkeys(n.words for n in needed[key] if not n.is_met(config)):
                lacking.setdefault(words, []).append(f"{name}.{key}")
    for words, keys in lacking.items():
        refuse_unused("", config, keys, f"without {words}")


def _takes_auto(annotation: Any) -> bool:
    return any(part == AUTO or _takes_auto(part) for part in get_args(annotation))


def refuse_unused(
    name: str,
    section: Any,
    keys: Iterable[str],
    why: str,
    instead: str = ", or that setting",
    *,
    right: str | None = None,
) -> None:
    """Refuse those of `keys` whose values are not their defaults, all in one line.

    docs/decisions/layout.md lists the keys that are accepted without an effect, and why.

    Args:
        name: the section's name as users write it, for example "model"; "" for the whole
            configuration.
        section: the section, or the whole configuration, or an object with some of its sections.
        keys: keys of the section that have no effect; dotted if they are in sections within it.
        why: the reason, a missing or a conflicting setting: "without model.sliding_window".
        instead: end of the line, after the default values.
        right: what is expected, in words; None: the default values followed by `instead`.

    Raises:
        ConfigError: one of the keys does not have its default.
    """
    unused = given(section, keys)
    if unused:
        shown = list(_with_values(f"{name}." if name else "", section, unused))
        has = f"{', '.join(shown)} {'has' if len(shown) == 1 else 'have'}"
        usual = together([_shown(_default(section, key)) for key in unused])
        raise ConfigError(f"{has} no effect {why}: expected {right or f'{usual}{instead}'}")


def given(section: Any, keys: Iterable[str]) -> list[str]:
    """Return those of `keys` whose values in `section` are not their defaults."""
    return [key for key in keys if _value(section, key) != _default(section, key)]


def _shown(default: Any) -> str:
    return "none" if default == {} else text_of(default)


def _with_values(before: str, section: Any, keys: Iterable[str]) -> Iterator[str]:
    """Yield ``key=value`` for each key, prefixed by `before`; entries of a mapping one by one."""
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
