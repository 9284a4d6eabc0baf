"""Commands of the pages for newcomers and of docs/CONTRIBUTING.md, which are run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from tests.parity.guides import PAGES, commands, wrong_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words", [words for text in PAGES.values() for words in commands(text)], ids=" ".join
)
def test_commands(words: list[str]) -> None:
    """Plans, lists and help are run; of what trains or tests the arguments are looked at."""
    files = [word.partition("::")[0] for word in words if "/" in word and "=" not in word]
    assert [*wrong_files(files)] == []
    if "train.py" in words:
        given = words[words.index("train.py") + 1 :]
        command = parse(given)
        if command.help is None:
            world = int(words[words.index("--nproc") + 1]) if "--nproc" in words else None
            resolve(command.config, world, command.config.model.vocab_size or 50257)
    if {"--dry-run", "--help", "--list"}.intersection(words) or "scripts/schedule.py" in words:
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
