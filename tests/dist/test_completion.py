"""What Tab completes, asked of real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe import completion, console
from megapipe.cli import parse
from megapipe.errors import ConfigError
from megapipe.keys import KEYS

pytestmark = pytest.mark.full
ASK = """
COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=()
_megapipe
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, line: str) -> list[str]:
    text = completion.script("bash", list(console.COMMANDS)) + ASK
    done = subprocess.run(
        ["bash", "-c", text, "bash", line], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megapipe tr", ["train"]),
        ("megapipe c", ["context", "convert", "checkpoint", "completion"]),
        ("megapipe train quickst", ["quickstart", "quickstart_moe"]),
        ("megapipe train quickstart optimizer.lr", ["optimizer.lr="]),
        ("megapipe train quickstart --t", ["--time-slices", "--traceback"]),
        ("megapipe train quickstart model.norm=r", ["rmsnorm"]),
        ("megapipe train quickstart model.bias=", ["true", "false"]),
        ("megapipe train quickstart pipeline.schedule=zb_h", ["zb_h1", "zb_h2"]),
        ("megapipe train min", ["mine.yaml"]),
        ("megapipe train mine.yaml data.source=te", ["texts.jsonl"]),
        ("megapipe generate te", ["texts.jsonl"]),
        ("python -m megapipe train quickstart optimizer.min_", ["optimizer.min_lr="]),
        ("megapipe train nothing.of.the.kind", []),
    ],
)
def test_words_and_files_are_completed(line: str, words: list[str], tmp_path: Path) -> None:
    for name in ("mine.yaml", "mine.txt", "texts.jsonl"):
        (tmp_path / name).touch()
    assert set(completed(tmp_path, line)) >= set(words)
    assert len(completed(tmp_path, line)) == len(words) or line.endswith("optimizer.lr")


def test_every_key_is_completed_and_every_value_is_one() -> None:
    text = completion.script("bash", list(console.COMMANDS))
    assert all(f" {key}=" in text for key in KEYS)
    for key, words in completion._values():
        assert len(words) > 1
        for word in words:
            assert f"{key}={word}: expected" not in problem(key, word)


def problem(key: str, word: str) -> str:
    """What is wrong with a configuration that has this key alone."""
    try:
        parse([f"{key}={word}"])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_takes_the_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megapipe", "completion", shell],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("autoload") == (shell == "zsh")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)
