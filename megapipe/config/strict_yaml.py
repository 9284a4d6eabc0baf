"""Parser of a small, strict subset of YAML, enough for configurations and without surprises.

PyYAML follows YAML 1.1, where ``1e-4`` is text, ``off`` is false, ``010`` is 8 and ``1:30`` is 90.
This parser follows the core schema of YAML 1.2: numbers are decimal, ``1e-4`` is a number, only
``true`` and ``false`` are booleans, ``null``, ``~`` and nothing are null, and the rest is text.
Repeated keys, tags, anchors, aliases, NaN and infinity are errors.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

Scalar = str | int | float | bool | None
Value = Scalar | list[Any]

MOST_BYTES = 1 << 20
"""Maximum size of a document, in bytes."""
_MOST_DEPTH = 8
_MOST_DIGITS = 40

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("null", r"(?:~|null|Null|NULL|)", "~nN\0"),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        (
            r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+.0123456789",
    ),
)


class YamlError(Exception):
    """A mistake in a document, with its line (from 1; None if no line is known)."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class YamlEntry:
    """A key of a document: dotted name, value and line number."""

    key: str
    value: Value
    line: int


def _resolvers() -> dict[Any, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's table of the types of unquoted scalars, by the scalar's first character."""
    table: dict[Any, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, starts in _RESOLVERS:
        rule = f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z")
        for start in starts:
            table.setdefault("" if start == "\0" else start, []).append(rule)
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise YamlError("anchors and aliases are not allowed; write the value again", line)
        if event.tag is not None:
            raise YamlError(f"the tag {event.tag} is not allowed; write the plain value", line)
        if self.depth > _MOST_DEPTH:
            raise YamlError(f"nested deeper than {_MOST_DEPTH} levels", line)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """Represent a text. Line breaks survive only between double quotes, as escapes."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_inline(self, items: list[Any]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_inline)


def parse_mapping(text: str) -> list[YamlEntry]:
    """Return the entries of a document that is a mapping; nested keys get dotted names.

    An empty section yields no entry. Raises :class:`YamlError`.
    """
    node = _compose(text)
    if node is None or _is_null(node):
        return []
    if not isinstance(node, yaml.MappingNode):
        raise YamlError("expected sections with keys, such as 'model:'", _line(node))
    return _entries(node, "")


def parse_value(key: str, text: str) -> list[YamlEntry]:
    """Parse `text` as the value of `key`: one entry, or one entry per nested key of a mapping."""
    if text.startswith("%"):  # a document's directive, never a value
        return [YamlEntry(key, text, 1)]
    node = _compose(text)
    if isinstance(node, yaml.MappingNode):
        return _entries(node, f"{key}.")
    return [YamlEntry(key, None if node is None else _value(node), 1)]


def dump(tree: dict[str, dict[str, Value]]) -> str:
    """Write a tree of sections and keys as a document that :func:`parse_mapping` can read."""
    return _dump(tree)


def text_of(value: Value) -> str:
    """Return `value` on one line, as it would be written in a document."""
    return _dump(value).strip().removesuffix("...").strip()


def _dump(data: Any) -> str:
    return yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=10**6,
    )


def _compose(text: str) -> Any:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise YamlError(f"not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character {chr(error.character)!a} is not allowed", line) from None
    except (ValueError, OverflowError):  # raised by chr
        raise YamlError("not valid YAML: an escape of a character that is not in Unicode") from None


def _entries(mapping: yaml.MappingNode, prefix: str) -> list[YamlEntry]:
    entries: list[YamlEntry] = []
    seen: dict[str, int] = {}
    for key_node, node in mapping.value:
        key = _value(key_node)
        if not isinstance(key, str):
            raise YamlError(f"the key {key!r} is not a name", _line(key_node))
        name = prefix + key
        if isinstance(node, yaml.MappingNode):
            found = _entries(node, f"{name}.")
        else:
            found = [YamlEntry(name, _value(node), _line(key_node))]
        for entry in found:
            if entry.key in seen:
                raise YamlError(
                    f"{entry.key} is given twice, first in line {seen[entry.key]}", entry.line
                )
            seen[entry.key] = entry.line
        entries += found
    return entries


def _value(node: yaml.Node) -> Value:
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        raise YamlError("a mapping is not allowed in this place", _line(node))
    text: str = node.value
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text[0] in "tT"
    if kind == "int":
        if len(text) > _MOST_DIGITS:
            raise YamlError(f"a number of {len(text)} digits is too long", _line(node))
        return int(text)
    if kind == "float":
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise YamlError(f"{text} is not a finite number", _line(node))
        return number
    return text


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and _value(node) is None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
