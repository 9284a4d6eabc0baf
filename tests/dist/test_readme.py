"""The README's own commands, one after the other, in a copy of what a fresh clone has.

Trainings are cut short by settings behind the command, as anybody could: `SHORT`. What needs GPUs,
a cluster, Docker or the hub is looked at as text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from megapipe.cli import parse
from tests.parity.clone import make_clone, run
from tests.parity.pages import blocks
from tests.parity.tiers import in_parts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("On 8 GPUs", "On SLURM", "In Docker")
"""Sections whose commands are not for every machine."""
SHORT = (
    "train.steps=3 train.sequence_length=32 train.validation_samples=8 data.source=text.jsonl "
    "log.every=1"
)


def commands(*, here: bool) -> list[str]:
    """Return the commands of the README in its order."""
    found = []
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        if (section.partition("\n")[0] not in ELSEWHERE) == here:
            found += blocks(section)
    return found


def trains(command: str) -> bool:
    words = shlex.split(command)
    script = "scripts/quickstart.sh" in words or "train.py" in words or "train" in words
    return script and not {"--dry-run", "--help"}.intersection(words)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make what a fresh clone has, and a text."""
    clone = tmp_path / "megapipe"
    make_clone(clone)
    lines = [f'{{"text": "def f{i}(x):\\n    return x + {i}\\n"}}\n' for i in range(400)]
    (clone / "text.jsonl").write_text("".join(lines))
    return clone


@pytest.mark.full
def test_commands_work_without_the_trainings(clone: Path) -> None:
    """Trainings are planned, and what reads their runs is left out."""
    script = []
    for command in commands(here=True):
        if "scripts/quickstart.sh" in command or "generate" in command:
            continue
        if trains(command):  # the plan needs one process
            words = shlex.split(command)
            command = shlex.join(["python", *words[words.index("train.py") :], "--dry-run"])
        script.append(command)
    printed = run(clone, script)
    assert printed.count("\nplan of ") == sum("--dry-run" in command for command in script)
    assert (clone / "zb_v.svg").stat().st_size


@in_parts("run_name", ["zero_bubble", "timeline", "2bw"], full=3)
def test_commands_work_one_after_the_other(clone: Path, run_name: str) -> None:
    """The quickstart, one training more with what reads its run, and what trains nothing."""
    others = {"zero_bubble", "timeline", "2bw"} - {run_name}
    wanted = [c for c in commands(here=True) if not others & {*re.split(r"[ =/]", c)}]
    assert sum(map(trains, wanted)) == 2
    printed = run(clone, [f"{c} {SHORT}" if trains(c) else c for c in wanted])
    more, going_on, export = (
        re.search(rf"^{name} +(\S.*)$", printed, re.MULTILINE)[1]  # type: ignore[index]
        for name in ("to generate", "to continue", "to export")
    )
    assert more.startswith(".venv/bin/python -m megapipe generate runs/quickstart-")
    assert "step 6/6" in run(clone, [more, going_on, export])
    exported = json.loads((clone / export.split()[-1] / "config.json").read_text(encoding="utf-8"))
    assert exported["architectures"] == ["LlamaForCausalLM"]
    assert (clone / "runs" / os.readlink(clone / "runs/latest")).is_dir()
    names = {path.name for path in (clone / "runs").iterdir()}
    assert run_name in names
    assert any(name.startswith("quickstart-") for name in names)


def test_the_page_on_streams_trains_as_the_readme_does() -> None:
    shown = blocks((ROOT / "docs/streams.md").read_text(encoding="utf-8"))
    training = [command for command in shown if trains(command)]
    assert training
    assert {*training} <= {*commands(here=True)}


def test_other_commands_name_what_is_there() -> None:
    seen = commands(here=False)
    assert {command.split()[0] for command in seen} >= {"pip", "sbatch", "docker"}
    for command in seen:
        words = shlex.split(command)
        for word in words:
            if word.endswith(".yaml"):
                settings = words[words.index(word) :]
                parse(settings)
            if re.search(r"\.(py|sbatch|sh)$", word):
                assert (ROOT / word).is_file(), word
        if "build" in words:
            assert words[-1] == "."
            assert (ROOT / "Dockerfile").is_file()
