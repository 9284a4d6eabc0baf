"""The commands on the pages of docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tests.parity.jobs import ROOT

DOCS = ROOT / "docs"
FOLDERS = ("benchmarks", "configs", "docs", "examples", "megapipe", "scripts", "tests", ".ci")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BESIDE_TEXT = re.compile(r"^    (?:\$ )?((?:python|megapipe|scripts/\S+\.sh) .*)$", re.MULTILINE)
"""A command in an indented paragraph."""
_WITHIN_TEXT = re.compile(r"`((?:[\w.]+ )*?(?:python|megapipe|\S+\.py|scripts/\S+\.sh) [^`|]+)`")
"""A possible command in a sentence."""
_ARGUMENT = re.compile(r" --|=| \S*/| [A-Z]{3}")
"""Shows that a command is used, and not only named."""
_SCRIPT = re.compile(r"^(?:scripts/|benchmarks/)?(\w+\.py)\b")


def blocks(text: str) -> list[str]:
    """Return the commands in shell blocks, without comments and line breaks, in order."""
    return [command for _, command in _of_blocks(_joined(text))]


def commands(text: str) -> list[str]:
    """Return all commands of a page in order, including those in sentences."""
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
    """Yield the words that look like files of the repository but are not."""
    for word in words:
        if word.partition("/")[0] in FOLDERS and "/" in word and not (ROOT / word).exists():
            yield word


def _joined(text: str) -> str:
    """Join the lines of a text that break within commands."""
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
    """Complete a command of a sentence, which may lack the interpreter and the folder."""
    command = " ".join(command.split())
    script = _SCRIPT.match(command)
    if script is None:
        return command
    for folder in ("scripts", "benchmarks"):
        if (ROOT / folder / script[1]).exists():
            return f"python {folder}/{_SCRIPT.sub(script[1], command)}"
    return f"python {command}"
