"""The commands that the pages of docs/ show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tests.parity.jobs import ROOT

DOCS = ROOT / "docs"
FOLDERS = ("benchmarks", "configs", "docs", "megapipe", "scripts", "tests", ".ci")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BESIDE_TEXT = re.compile(r"^    (?:\$ )?((?:python|megapipe|scripts/\S+\.sh) .*)$", re.MULTILINE)
"""A command in a paragraph that is set off by spaces."""
_WITHIN_TEXT = re.compile(r"`((?:[\w.]+ )*?(?:python|megapipe|\S+\.py|scripts/\S+\.sh) [^`|]+)`")
"""What may be a command in a sentence."""
_ARGUMENT = re.compile(r" --|=| \S*/| [A-Z]{3}")
"""What a command has that is more than named."""
_SCRIPT = re.compile(r"^(?:scripts/|benchmarks/)?(\w+\.py)\b")


def blocks(text: str) -> list[str]:
    """The commands in blocks for a shell, without comments and line breaks, in their order."""
    return [command for _, command in _of_blocks(_joined(text))]


def commands(text: str) -> list[str]:
    """All commands of a page in their order, those of its sentences too."""
    text = _joined(text)
    rest = BLOCK.sub(lambda block: " " * len(block[0]), text)
    found = [*_of_blocks(text)]
    found += [(match.start(), _plain(match[1])) for match in _BESIDE_TEXT.finditer(rest)]
    found += [
        (match.start(), _from_the_root(match[1]))
        for match in _WITHIN_TEXT.finditer(rest)
        if _ARGUMENT.search(match[1].partition(" ")[2])
    ]
    return [command for _, command in sorted(found)]


def wrong_files(words: list[str]) -> Iterator[str]:
    """Those of some words that look like files of the repository and are none."""
    for word in words:
        if word.partition("/")[0] in FOLDERS and "/" in word and not (ROOT / word).exists():
            yield word


def _joined(text: str) -> str:
    """A text whose lines do not break within commands."""
    return text.replace("\\\n", "  ")


def _of_blocks(text: str) -> Iterator[tuple[int, str]]:
    for block in BLOCK.finditer(text):
        at = block.start(2)
        for line in block[2].splitlines(keepends=True):
            if block[1] == "sh" and (command := _plain(line)):
                yield at, command
            elif block[1] in ("console", "") and line.startswith("$ "):
                yield at, _plain(line[2:])
            at += len(line)


def _plain(line: str) -> str:
    return shlex.join(shlex.split(line, comments=True)).replace("'>'", ">")


def _from_the_root(command: str) -> str:
    """A command of a sentence, which may leave out the interpreter and the folder."""
    command = " ".join(command.split())
    script = _SCRIPT.match(command)
    if script is None:
        return command
    for folder in ("scripts", "benchmarks"):
        if (ROOT / folder / script[1]).exists():
            return f"python {folder}/{_SCRIPT.sub(script[1], command)}"
    return f"python {command}"
