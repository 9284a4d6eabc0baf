"""The README's own commands, one after the other, in a copy of what a fresh clone has.

Trainings are cut short by settings behind the command, as anybody could: `SHORT`. What needs GPUs,
a cluster, Docker or the hub is looked at as text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megapipe.cli import parse
from tests.parity.marks import in_parts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("On 8 GPUs", "On SLURM", "In Docker")
"""Sections whose commands are not for any machine."""
SHORT = (
    "train.steps=3 train.sequence_length=32 train.validation_samples=8 data.source=text.jsonl "
    "log.every=1"
)
CONSOLE = "import sys\nfrom megapipe.console import main\nsys.exit(main())\n"
"""What pip writes for an entry point."""


def commands(*, here: bool) -> list[str]:
    """The commands of the README in its order."""
    found = []
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        if (section.partition("\n")[0] not in ELSEWHERE) == here:
            found += commands_in(section)
    return found


def commands_in(text: str) -> list[str]:
    """The commands of blocks for a shell, comments and line breaks taken out."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def trains(command: str) -> bool:
    words = shlex.split(command)
    script = "scripts/quickstart.sh" in words or "train.py" in words or "train" in words
    return script and not {"--dry-run", "--help"}.intersection(words)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git has of this tree, with a .venv that is complete: the packages of this one."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    if not files:
        pytest.skip("not a git work tree")
    clone = tmp_path / "megapipe"
    for name in files:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    venv.create(clone / ".venv")
    (site,) = (clone / ".venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{clone}\n{sysconfig.get_path('purelib')}\n")
    console = clone / ".venv/bin/megapipe"
    console.write_text(f"#!{clone}/.venv/bin/python\n{CONSOLE}")
    console.chmod(0o755)
    digest = hashlib.sha256(os.fsencode(clone))
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((clone / name).read_bytes())
    (clone / ".venv/megapipe.stamp").write_text(f"{digest.hexdigest()}\n")
    lines = [f'{{"text": "def f{i}(x):\\n    return x + {i}\\n"}}\n' for i in range(400)]
    (clone / "text.jsonl").write_text("".join(lines))
    return clone


def run(clone: Path, script: list[str]) -> str:
    """Run commands in one shell that stops at the first that fails; what they print."""
    kept = ("HOME", "LANG", "LC_ALL", "TMPDIR")
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(script)],
        cwd=clone,
        env={
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


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
        for name in ("more text", "to go on", "to export")
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
    shown = commands_in((ROOT / "docs/streams.md").read_text(encoding="utf-8"))
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
                parse([word for word in settings if word != "--dry-run"])
            if re.search(r"\.(py|sbatch|sh)$", word):
                assert (ROOT / word).is_file(), word
        if "build" in words:
            assert words[-1] == "."
            assert (ROOT / "Dockerfile").is_file()
