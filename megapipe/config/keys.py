"""The keys of the configuration: which there are, what each expects, what a wrong one may mean.

All of it is read off the models in :mod:`megapipe.config.config`.
"""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher, get_close_matches
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megapipe.config.config import Config
from megapipe.config.section import ExpectedText, Section, keys_within, rules_of, sections_within
from megapipe.config.strict_yaml import Value
from megapipe.errors import ConfigError
from megapipe.util.user_code import is_source, is_user_code


def _values(annotation: Any) -> type[Section] | None:
    kind = get_args(annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


SECTIONS: dict[str, type[Section]] = dict(sections_within(Config))
"""Every section, by name; that of a section within another is dotted."""

KEYS: dict[str, FieldInfo] = {
    key: section.model_fields[name] for key, section, name in keys_within(Config)
}
"""Every key, by its dotted name."""

MAPPINGS: dict[str, type[Section] | None] = {
    key: _values(info.annotation)
    for key, info in KEYS.items()
    if get_origin(info.annotation) is dict
}
"""Keys that are mappings from names of the user's, with the section that each value is, if any."""


CODE = (
    *("pipeline.schedule", "context.plan", "model.source", "train.loss"),
    *("model.norm", "model.moe.scores", "experts.dispatch"),
    *("optimizer.rule", "optimizer.schedule"),
)
"""Keys that may name code of the user's, beside sources of data."""


def user_code_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Each key whose value names code of the user's, with the value."""
    for key in CODE:
        value = attrgetter(key)(config)
        if value is not None and is_user_code(value):
            yield key, value
    for name, layout in config.parallel.layouts.items():
        if layout.schedule is not None and is_user_code(layout.schedule):
            yield f"parallel.layouts.{name}.schedule", layout.schedule
    yield from ((key, source) for key, source in config.data.named if is_source(source))


def refuse_code(config: Config, where: str) -> None:
    """Raise :class:`ConfigError` if ``run.own_code`` refuses code that a value names.

    To be called before code may be loaded; `where` begins the line.
    """
    if config.run.own_code == "refuse":
        for key, value in user_code_keys(config):
            raise ConfigError(
                f"{where}: {key}={value}: it names code to run, which run.own_code=refuse does not "
                "allow"
            )


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a configuration as a tree, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_of(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner, key)


def field_of(key: str) -> FieldInfo | None:
    """The field of a key, or of one below a mapping: ``data.mixture.NAME.weight``."""
    parts = key.split(".")
    mapping = ".".join(parts[:2])
    if mapping not in MAPPINGS or mapping == key:
        return KEYS.get(key)
    section = MAPPINGS[mapping]
    if section is None:
        return KEYS[mapping] if len(parts) == 3 else None
    return section.model_fields.get(parts[3]) if len(parts) == 4 else None


def entry_of(key: str) -> str | None:
    """Return the entry of a mapping that a key names, or that it is in: ``data.mixture.NAME``."""
    parts = key.split(".")
    return ".".join(parts[:3]) if len(parts) > 2 and ".".join(parts[:2]) in MAPPINGS else None


def expected(info: FieldInfo) -> str:
    """Values that a field takes, in words: its own, or those of its type and bounds."""
    for rule in rules_of(info, ExpectedText):
        return rule.words
    words = ", or ".join(_alternatives(info.annotation))
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    if bounds:
        words = words.replace("number", f"number {' and '.join(bounds)}", 1)
    return words


def few_values(info: FieldInfo) -> list[str]:
    """Return the words that a field takes, if they are a few; [] if it takes others too."""
    words = expected(info)
    if words == "true or false":
        return ["true", "false"]
    if not words.startswith("one of "):
        return []
    return words.removeprefix("one of ").partition(", or ")[0].split(", ")


def unknown(key: str) -> str:
    """The words of an error about an unknown key: the nearest key, or which keys there are."""
    for mapping, values in MAPPINGS.items():
        if key.startswith(f"{mapping}."):
            names = "NAME" if values is None else f"NAME.{'|'.join(values.model_fields)}"
            return f"unknown key; expected {mapping}.{names}"
    name, _, leaf = key.rpartition(".")
    section = _close(name, SECTIONS)
    if section is None and "." in name:
        name, _, leaf = key.partition(".")
        section = _close(name, SECTIONS)
    same = [other for other in KEYS if other.rpartition(".")[2] == leaf]
    near = _close(leaf, SECTIONS[section].model_fields) if section else None
    if same:
        nearest = max(same, key=lambda other: SequenceMatcher(None, key, other).ratio())
        return f"unknown key; did you mean {nearest}?"
    if near:
        return f"unknown key; did you mean {section}.{near}?"
    if section:
        return f"unknown key; {section} has {', '.join(SECTIONS[section].model_fields)}"
    elsewhere = _close(leaf, [other.rpartition(".")[2] for other in KEYS])
    if elsewhere:
        return unknown(elsewhere)
    return f"unknown key; the sections are {', '.join(Config.model_fields)}"


def unknown_to_unset(key: str) -> str:
    """Word the error about a key that is to be unset, where a section may be meant."""
    near = _close(key, SECTIONS) if "." not in key else None
    return unknown(key) if near is None else f"unknown key; did you mean {near}?"


def literal_type_fits(annotation: Any, value: Value) -> bool:
    """False for a value that only equals a literal, as true equals 1."""
    if get_origin(annotation) is not Literal:
        return True
    return all(type(option) is type(value) for option in get_args(annotation) if option == value)


def _alternatives(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        options = [str(option) for option in get_args(annotation)]
        return [f"one of {', '.join(options)}" if len(options) > 1 else options[0]]
    if get_origin(annotation) is list:
        return [f"a list, each item {_alternatives(get_args(annotation)[0])[0]}"]
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_args(annotation):
        return [word for part in get_args(annotation) for word in _alternatives(part)]
    names = {
        bool: "true or false",
        str: "text",
        int: "a whole number",
        float: "a number",
        NoneType: "null",
    }
    return [names[annotation]]


def _close(word: str, words: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word, list(words), n=1, cutoff=0.7)), None)
