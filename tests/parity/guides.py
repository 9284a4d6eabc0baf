"""The pages for newcomers, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tests.parity.jobs import ROOT

DOCS = ROOT / "docs"
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8")
    for name in ("CONTRIBUTING.md", "from_megatron.md", "from_deepspeed.md", "from_others.md")
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("benchmarks", "configs", "docs", "megapipe", "scripts", "tests", ".ci")


def wrong_files(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.partition("/")[0] in FOLDERS and "/" in word and not (ROOT / word).exists():
            yield word


def commands(text: str) -> list[list[str]]:
    """The words of every command in a block for a shell."""
    shell = "".join(body for language, body in BLOCK.findall(text) if language == "sh")
    lines = shell.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
