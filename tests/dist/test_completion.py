"""What Tab completes, asked of real shells."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe import completion, console
from megapipe.cli import parse
from megapipe.config.keys import KEYS, few_values
from megapipe.errors import ConfigError

pytestmark = pytest.mark.full
ASK = """
COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=()
_megapipe
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, line: str) -> list[str]:
    """Return the words that bash offers. The command's words are loaded already, as after the first
    Tab."""
    command = next((word for word in console.COMMANDS if f" {word} " in line), None)
    text = completion.script("bash", list(console.COMMANDS))
    text += (completion.words(command) if command else "") + ASK
    done = subprocess.run(
        ["bash", "-c", text, "bash", line], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


FILES = ["mine.yaml", "mine.txt", "texts.jsonl"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megapipe tr", ["train"]),
        ("megapipe c", ["config", "context", "convert", "checkpoint", "completion"]),
        ("megapipe --v", ["--version"]),
        ("megapipe train quickst", ["quickstart", "quickstart_moe"]),
        ("megapipe train quickstart optimizer.lr", ["optimizer.lr="]),
        ("megapipe train quickstart --t", ["--time-slices", "--traceback"]),
        ("megapipe train quickstart --dry-run --g", ["--gpus"]),
        ("megapipe train quickstart --dry-run --gpus ", []),
        ("megapipe train quickstart model.norm=r", ["rmsnorm"]),
        ("megapipe train quickstart model.bias=", ["true", "false"]),
        ("megapipe train quickstart pipeline.schedule=zb_h", ["zb_h1", "zb_h2"]),
        ("megapipe train min", ["mine.yaml"]),
        ("megapipe train mine.yaml data.source=te", ["texts.jsonl"]),
        ("megapipe train --help opt", ["optimizer", *(k for k in KEYS if k.startswith("opt"))]),
        ("python -m megapipe train quickstart optimizer.min_", ["optimizer.min_lr="]),
        ("megapipe launch --nproc 2 -m megapipe train quickstart --dry", ["--dry-run"]),
        ("megapipe train nothing.of.the.kind", []),
        ("megapipe generate te", ["texts.jsonl"]),
        ("megapipe generate texts --te", ["--temperature"]),
        ("megapipe generate texts --prompts ", FILES),
        ("megapipe generate texts --prompts=t", ["texts.jsonl"]),
        ("megapipe convert megapipe-to", ["megapipe-to-hf", "megapipe-to-dcp"]),
        ("megapipe convert megapipe-to-hf a b --model-type qwen", ["qwen2", "qwen3", "qwen3_moe"]),
        ("megapipe convert megapipe-to-hf texts out --model-type=gpt_", ["gpt_neox"]),
        ("megapipe convert inspect te", ["texts.jsonl"]),
        ("megapipe convert inspect --conf", ["--config"]),
        ("megapipe evaluate per", ["perplexity"]),
        ("megapipe checkpoint di", ["diff"]),
        ("megapipe schedule sh", ["show"]),
        ("megapipe schedule show zb_h", ["zb_h1", "zb_h2"]),
        ("megapipe schedule show zb_h1 --placement wa", ["wave"]),
        (
            "megapipe schedule compare --ranks 4 --config llama_8b_",
            ["llama_8b_128k", "llama_8b_1m"],
        ),
        (
            "megapipe schedule simulate 1f1b --weight-versions double_",
            ["double_buffer", "double_group"],
        ),
        ("megapipe context compare llama_8b_1m context.algorithm=double", ["double_ring"]),
        ("megapipe context compare llama_8b_1", ["llama_8b_128k", "llama_8b_1m"]),
        ("megapipe experts rebalance runs experts.replica_s", ["experts.replica_slots="]),
        ("megapipe prepare-data tokenize --sample-format super", ["supervised"]),
        ("megapipe launch --np", ["--nproc", "--nproc-per-node"]),
        ("megapipe launch --nproc 2 mine.", ["mine.yaml", "mine.txt"]),
        ("megapipe summary te", ["texts.jsonl"]),
        ("megapipe doctor --s", ["--spin"]),
        ("megapipe completion z", ["zsh"]),
    ],
)
def test_words_and_files_are_completed(line: str, words: list[str], tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    found = completed(tmp_path, line)
    if line.endswith("optimizer.lr"):
        assert set(found) >= set(words)
    else:
        assert sorted(found) == sorted(words)


def test_every_key_is_completed_and_every_value_is_one() -> None:
    text = completion.words("train")
    assert all(f" {key}=" in text for key in KEYS)
    for key, info in KEYS.items():
        for word in few_values(info):
            assert f"{key}={word}: expected" not in problem(key, word)


def problem(key: str, word: str) -> str:
    """Return what is wrong with a configuration that has this key alone."""
    try:
        parse([f"{key}={word}"])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_takes_the_script(shell: str) -> None:
    texts = [completion.script(shell, list(console.COMMANDS))]
    assert texts[0].startswith("autoload") == (shell == "zsh")
    texts += map(completion.words, console.COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    for text in texts:
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_tab_in_a_shell_asks_for_the_words_of_a_command(tmp_path: Path) -> None:
    """Before the first Tab the shell has the names of commands alone."""
    (tmp_path / "runs").mkdir()
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"},
    )
    os.close(theirs)
    lines = [
        "megapipe() { printf '<%s>' \"$@\"; }",
        f"source <('{sys.executable}' -m megapipe completion bash)",
        "megapipe sche\tsho\tzb_h1 --pla\tsing\t",
        "megapipe train quickstart optimizer.min_l\t2 model.norm=rms\t",
        "megapipe doctor ru\tx",
        "exit",
    ]
    os.write(ours, "".join(f"{line}\n" for line in lines).encode())
    shown = b""
    while shell.poll() is None or b"exit" not in shown:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the shell has ended
            break
    os.close(ours)
    assert shell.wait(30) == 0
    text = shown.decode()
    assert "<schedule><show><zb_h1><--placement><single>" in text
    assert "<train><quickstart><optimizer.min_lr=2><model.norm=rmsnorm>" in text
    assert "<doctor><runs/x>" in text, "a folder goes on"
