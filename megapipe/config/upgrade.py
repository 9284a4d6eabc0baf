"""Replaces old key names in a configuration's text by current names, and keeps the comments."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import yaml

from megapipe.config import strict_yaml
from megapipe.config.old_names import new_name, with_new_names
from megapipe.config.strict_yaml import Value, YamlError

_LINE_END = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")
"""Matches the line breaks of YAML."""


class Upgraded(NamedTuple):
    """A configuration's text with current key names."""

    text: str
    names: Mapping[str, str | None]
    """Current name of each old key; None for a key that had no effect and is removed."""


@dataclass
class _Section:
    """Where a mapping of the YAML document is. Mappings are listed by their current names."""

    header: int | None
    """Line of the mapping's key; None for the document itself."""
    indent: int
    """Indentation of the mapping's keys."""
    last: int
    """Last line of the mapping's final key and its value."""
    stays: bool = False
    """Whether at least one of the mapping's keys is not moved to another section."""


@dataclass
class _Document:
    lines: list[str]
    sections: dict[str, _Section] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    moved: dict[str, list[list[str]]] = field(default_factory=lambda: defaultdict(list))
    """Lines of moved keys, without indentation, by the section that they move to."""


def upgrade(text: str) -> Upgraded:
    """Replace the old key names in the text of a YAML configuration; a text without old names stays
    unchanged.

    A key that moves to another section takes along the comments above it and behind it. All lines
    end with CRLF if one line of the text does, else with LF. Raises :class:`YamlError` if the text
    is not a configuration, if an old name is in braces, and if the text cannot be rewritten with
    the same meaning.
    """
    entries = strict_yaml.parse_mapping(text)
    names: dict[str, str | None] = {e.key: None for e in entries if new_name(e.key) is not None}
    if not names:
        return Upgraded(text, names)
    targets: dict[int, tuple[str, Value]] = {}
    by_name: dict[str, int] = {}
    for number, key, value in with_new_names([(entry.key, entry.value) for entry in entries]):
        targets.pop(by_name.get(key, -1), None)  # the last of keys that became one has all values
        targets[number], by_name[key] = (key, value), number
        if entries[number].key in names:
            names[entries[number].key] = key
    document = _Document(_LINE_END.split(text))
    changes = {entries[number].key: found for number, found in targets.items()}
    _walk(document, _compose(text), None, "", "", {entry.key for entry in entries}, changes)
    _insert(document)
    result = ("\r\n" if "\r\n" in text else "\n").join(document.lines)
    with contextlib.suppress(YamlError):
        if {e.key: e.value for e in strict_yaml.parse_mapping(result)} == dict(targets.values()):
            return Upgraded(result, names)
    moved = ((old, f"{key}={strict_yaml.text_of(put)}") for old, (key, put) in changes.items())
    by_hand = ", ".join(f"{new} for {old}" for old, new in moved if new_name(old) is not None)
    raise YamlError(f"cannot be rewritten with the same meaning: expected, by hand, {by_hand}")


def _compose(text: str) -> yaml.MappingNode:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    return node


def _walk(
    document: _Document,
    node: yaml.MappingNode,
    header: int | None,
    old: str,
    new: str,
    keys: set[str],
    targets: Mapping[str, tuple[str, Value]],
) -> None:
    """Rename the keys of the mapping `node`, and remove keys that move to another section.

    `old` and `new` are the old and the current dotted name of the mapping; `header` is the line of
    its key, None for the whole document. `keys` are the dotted old names of all keys of the
    document. `targets` maps each of these to its current name and its value; it lacks keys that
    have no effect, which are removed.
    """
    children = list(_children(node))
    if not children:
        return
    indent = children[0][1].start_mark.column
    section = _Section(header, indent, _last_line(children[-1][2]))
    document.sections[new] = section
    for name, key, value in children:
        before, after = _join(old, name), _join(new, name)
        if before not in keys and isinstance(value, yaml.MappingNode) and value.value:
            after = new_name(before) or after
            _refuse_braces(node, key, before, changes=new_name(before) is not None)
            _rename(document, key, after, new)
            section.stays = True
            _walk(document, value, key.start_mark.line, before, after, keys, targets)
            continue
        target, put = targets.get(before, (None, None))
        same = target == before
        _refuse_braces(node, key, before, changes=not same)
        stays = target is not None and _parent(target) == _parent(after)
        if target is not None and stays and new_name(before) in (None, target):
            _rename(document, key, target, new)
            section.stays = True
            continue
        above = _comments_above(document, key)
        taken = range(above, _last_line(value) + 1)
        if target is not None:
            document.moved[_parent(target)].append(_moved(document, key, value, above, target, put))
        document.removed.update(taken)


def _moved(
    document: _Document,
    key: yaml.Node,
    value: yaml.Node,
    above: int,
    target: str,
    put: Value,
) -> list[str]:
    """Return the lines to insert for a key that moves: the comments above it, then its current name
    `target` with the value `put` and the comment behind it. `above`: first line of the comments."""
    comments = [line.strip() for line in document.lines[above : key.start_mark.line]]
    behind = document.lines[value.end_mark.line][value.end_mark.column :].strip()
    name = target.rpartition(".")[2]
    line = f"{name}: {strict_yaml.text_of(put)}"
    return [*comments, f"{line}  {behind}" if behind.startswith("#") else line]


def _insert(document: _Document) -> None:
    """Remove the lines of moved keys, and insert them into their new sections."""
    added: dict[int, list[str]] = defaultdict(list)
    for name, keys in document.moved.items():
        inside, missing = name, list[str]()
        while inside not in document.sections:
            inside, _, last = inside.rpartition(".")
            missing.insert(0, last)
        section = document.sections[inside]
        section.stays = True
        indent = section.indent
        for header in missing:
            added[section.last].append(" " * indent + f"{header}:")
            indent += 2
        added[section.last] += [" " * indent + line for key in keys for line in key]
    for section in document.sections.values():
        if section.header is not None and not section.stays:
            document.removed.add(section.header)
    result = []
    for number, line in enumerate(document.lines):
        result += [] if number in document.removed else [line]
        result += added.get(number, [])
    document.lines = result


def _children(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    for key, value in node.value:
        yield str(key.value), key, value


def _rename(document: _Document, key: yaml.Node, after: str, section: str) -> None:
    """Replace a key in the text by its current name `after`, written relative to its section."""
    line, name = key.start_mark.line, after.removeprefix(f"{section}.")
    text = document.lines[line]
    document.lines[line] = text[: key.start_mark.column] + name + text[key.end_mark.column :]


def _refuse_braces(node: yaml.MappingNode, key: yaml.Node, name: str, *, changes: bool) -> None:
    if changes and node.flow_style:
        raise YamlError(
            f"{name} is in braces: write it on a line of its own, then upgrade",
            key.start_mark.line + 1,
        )


def _comments_above(document: _Document, key: yaml.Node) -> int:
    """Return the line where the comments directly above a key begin, or the key's line."""
    line = key.start_mark.line
    while line and document.lines[line - 1].strip().startswith("#"):
        indent = len(document.lines[line - 1]) - len(document.lines[line - 1].lstrip())
        if indent != key.start_mark.column:
            break
        line -= 1
    return line


def _last_line(node: yaml.Node) -> int:
    """Return the last line of a value."""
    if isinstance(node, yaml.MappingNode) and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and node.value and not node.flow_style:
        return _last_line(node.value[-1])
    end = node.end_mark
    return int(end.line if end.column else max(node.start_mark.line, end.line - 1))


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _parent(key: str) -> str:
    return key.rpartition(".")[0]
