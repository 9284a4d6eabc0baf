"""Finds keys of the configuration, describes their values, and suggests what a typo may mean.

All of it is derived from the models in :mod:`megapipe.config.config`.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megapipe.config.config import Config
from megapipe.config.section import (
    ExpectedText,
    OptionsOf,
    Searched,
    Section,
    keys_within,
    rules_of,
    sections_within,
)
from megapipe.config.strict_yaml import Value
from megapipe.errors import ConfigError
from megapipe.util.user_code import REMOTE_CODE, is_class_name, is_source, is_user_code


def _values(annotation: Any) -> type[Section] | None:
    kind = get_args(annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


SECTIONS: dict[str, type[Section]] = dict(sections_within(Config))
"""Every section by name; a section within another has a dotted name."""

KEYS: dict[str, FieldInfo] = {
    key: section.model_fields[name] for key, section, name in keys_within(Config)
}
"""Field of every key, by dotted name."""

MAPPINGS: dict[str, type[Section] | None] = {
    key: _values(info.annotation)
    for key, info in KEYS.items()
    if get_origin(info.annotation) is dict
}
"""Keys that are mappings with user-defined names, such as ``data.mixture``, and for each the
section of an entry; None if an entry is a plain value."""


OPTIONS_OF: dict[str, OptionsOf] = {
    key: rule for key, info in KEYS.items() for rule in rules_of(info, OptionsOf)
}
"""Keys that are mappings of options, such as ``optimizer.options``, each with the key that selects
the options and with the options of that key's values."""

OPTION_KEYS: dict[str, list[FieldInfo]] = {
    f"{mapping}.{name}": [
        section.model_fields[name] for section in rule.by_section() if name in section.model_fields
    ]
    for mapping, rule in OPTIONS_OF.items()
    for name in rule.names()
}
"""Every option by dotted name, with its field in each section that has it."""


CODE = (
    *("pipeline.schedule", "context.algorithm", "model.source", "train.loss_function"),
    *("model.norm", "model.moe.score_function", "experts.dispatch"),
    *("optimizer.rule", "optimizer.schedule"),
)
"""Keys whose values may name user code. Keys of data sources may too, and are not listed."""


SEARCH_WORDS: dict[str, str] = {
    key: rule.word for key, info in KEYS.items() for rule in rules_of(info, Searched)
}
"""Keys whose values a search may choose, each with the value that asks for it."""


def user_code_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key whose value names user code, and the value."""
    for key in CODE:
        value = attrgetter(key)(config)
        if value is not None and is_user_code(value):
            yield key, value
    if is_class_name(config.model.source) and config.model.options.get(REMOTE_CODE):
        yield f"model.options.{REMOTE_CODE}", "true"
    for name, layout in config.parallel.elastic_layouts.items():
        if layout.schedule is not None and is_user_code(layout.schedule):
            yield f"parallel.elastic_layouts.{name}.schedule", layout.schedule
    yield from ((key, source) for key, source in config.data.named if is_source(source))


def refuse_code(config: Config, where: str) -> None:
    """Raise :class:`ConfigError` if ``run.user_code=refuse`` and a value names user code.

    Call this function before any user code is loaded. `where`: beginning of the message.
    """
    if config.run.user_code == "refuse":
        for key, value in user_code_keys(config):
            raise ConfigError(
                f"{where}: {key}={value}: it names code to run, which run.user_code=refuse does "
                "not allow"
            )


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a configuration's tree of dicts and lists, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_of(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner, key)


def field_of(key: str) -> FieldInfo | None:
    """Return the field of a key, also of a key in an entry of a mapping,
    ``data.mixture.NAME.weight``; None if there is no such key."""
    parts = key.split(".")
    mapping = ".".join(parts[:2])
    if mapping not in MAPPINGS or mapping == key:
        return KEYS.get(key)
    section = MAPPINGS[mapping]
    if section is None:
        return KEYS[mapping] if len(parts) == 3 else None
    return section.model_fields.get(parts[3]) if len(parts) == 4 else None


def entry_of(key: str) -> str | None:
    """Return the mapping entry that a key names or is in, ``data.mixture.NAME``; None for
    others."""
    parts = key.split(".")
    return ".".join(parts[:3]) if len(parts) > 2 and ".".join(parts[:2]) in MAPPINGS else None


def expected(info: FieldInfo) -> str:
    """Describe the values that a field takes: its :class:`ExpectedText`, or type and bounds."""
    for rule in rules_of(info, ExpectedText):
        return rule.words
    search = [rule.word for rule in rules_of(info, Searched)]
    words = ", or ".join([*_alternatives(info.annotation), *search])
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


def wrong_options(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, expected values) for every wrong option in a configuration's tree.

    Options of user-defined code are checked when the code is loaded.
    """
    for mapping, rule in OPTIONS_OF.items():
        value = _in_tree(tree, rule.key)
        owner = KEYS[rule.key].default if value is None else value
        section, given = rule.of(owner), _in_tree(tree, mapping) or {}
        if section is None:
            continue
        try:
            section.model_validate(given)
        except ValidationError as error:
            for name in dict.fromkeys(str(each["loc"][0]) for each in error.errors()):
                if name in section.model_fields:
                    yield f"{mapping}.{name}", f"expected {expected(section.model_fields[name])}"
                else:
                    has = ", ".join(section.model_fields) or "none"
                    yield (
                        f"{mapping}.{name}",
                        f"{rule.key}={owner} has no such option: it has {has}",
                    )


def _in_tree(tree: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return tree.get(section, {}).get(name)


def few_values(info: FieldInfo) -> list[str]:
    """Return the values of a field that takes one of a few words; [] for other fields."""
    words = expected(info)
    if words == "true or false":
        return ["true", "false"]
    if not words.startswith("one of "):
        return []
    return words.removeprefix("one of ").partition(", or ")[0].split(", ")


def unknown(key: str) -> str:
    """Return the error about an unknown key, with the most similar key or all possible keys."""
    for mapping, values in MAPPINGS.items():
        if key.startswith(f"{mapping}."):
            names = "NAME" if values is None else f"NAME.{'|'.join(values.model_fields)}"
            return f"unknown key; expected {mapping}.{names}"
    name, _, leaf = key.rpartition(".")
    section = _close(name, SECTIONS)
    if section is None and "." in name:
        name, _, leaf = key.partition(".")
        section = _close(name, SECTIONS)
    same = [other for other in (*KEYS, *OPTION_KEYS) if other.rpartition(".")[2] == leaf]
    within = [
        key.removeprefix(f"{section}.") for key in OPTION_KEYS if key.startswith(f"{section}.")
    ]
    by_leaf = {key.rpartition(".")[2]: key for key in within}
    near = _close(leaf, [*SECTIONS[section].model_fields, *by_leaf]) if section else None
    if same:
        nearest = max(same, key=lambda other: SequenceMatcher(None, key, other).ratio())
        return f"unknown key; did you mean {nearest}?"
    if near:
        return f"unknown key; did you mean {section}.{by_leaf.get(near, near)}?"
    if section:
        return f"unknown key; {section} has {', '.join(SECTIONS[section].model_fields)}"
    elsewhere = _close(leaf, [other.rpartition(".")[2] for other in KEYS])
    if elsewhere:
        return unknown(elsewhere)
    return f"unknown key; the sections are {', '.join(Config.model_fields)}"


def unknown_to_unset(key: str) -> str:
    """Return the error about an unknown key in KEY=unset. The user may have meant a section."""
    near = _close(key, SECTIONS) if "." not in key else None
    return unknown(key) if near is None else f"unknown key; did you mean {near}?"


def literal_type_fits(annotation: Any, value: Value) -> bool:
    """Whether a value that equals a literal also has its type: `true` equals 1, but is a bool."""
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
