"""What the documents show is what the project prints and draws, and their links lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from megapipe.schedule.generators import names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEDULES = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
PICTURES = {
    "1f1b": (),
    "interleaved_1f1b": ("--chunks", "2"),
    "zb_h1": (),
    "zb_v": (),
    "dualpipe": ("--microbatches", "10"),
    "seq1f1b": (),
}
"""What docs/NAME.svg shows beside four ranks and eight micro-batches."""
SCRIPT = ["python", "scripts/schedule.py"]


def blocks(language: str, page: str = SCHEDULES) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands_of_the_readme() -> list[list[str]]:
    """Return the words of every call of scripts/schedule.py in a block for a shell."""
    lines = "".join(blocks("sh", README)).replace("\\\n", " ").splitlines()
    calls = [line.partition("#")[0].split() for line in lines]
    return [words for words in calls if words[:2] == SCRIPT]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Enter and return the folder in which commands of a document run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_the_readme_shows_every_kind_of_use():
    shown = {words[2] for words in commands_of_the_readme()}
    assert shown >= {"list", "compare", "draw", "search"}


@pytest.mark.parametrize("words", commands_of_the_readme(), ids=lambda words: words[2])
def test_commands_of_the_readme_work(words, ask, folder):
    printed = ask(*words[2:])
    assert printed
    if "-o" in words:
        assert (folder / words[words.index("-o") + 1]).stat().st_size


def test_the_table_has_every_schedule():
    rows = SCHEDULES.partition("## The schedules")[2].partition("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("|")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(names())


def test_the_example_is_as_short_as_it_says():
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 30


def test_the_description_of_the_package_leads_to_no_path():
    """An index of packages shows this page alone; no file is beside it there."""
    path = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    page = (ROOT / path).read_text(encoding="utf-8")
    assert page.startswith("# megapipe\n")
    assert not re.findall(r"\]\((?!https:)|^\[[^]]+\]:|<(?:a|img)\b", page, re.MULTILINE)
    copied = (ROOT / "Dockerfile").read_text().partition("pip install")[0]
    assert f"COPY {path} " in copied, "pip reads it"


@pytest.mark.parametrize("block", [*blocks("console"), *blocks("console", README)])
def test_commands_print_what_is_shown(block, ask, folder):
    (example,) = blocks("python")
    (folder / "my_schedules.py").write_text(example)
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = command.split()
        assert words[:2] == SCRIPT
        printed = ask(*words[2:])
        assert shown in ("", printed)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_draw_writes(name, ask, tmp_path):
    assert f"({name}.svg)" in SCHEDULES
    size = ("--ranks", "4", "--microbatches", "8")
    ask("draw", name, *size, *PICTURES[name], "-o", tmp_path / "x.svg")
    assert (ROOT / f"docs/{name}.svg").read_text() == (tmp_path / "x.svg").read_text()


def test_top_level_is_what_it_should_be():
    files = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    made = {"runs", "cache", "wandb", "build", "dist"}
    assert {name for name in files - made if not name.endswith(".egg-info")} == {
        "CHANGELOG.md",
        "Dockerfile",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "benchmarks",
        "configs",
        "constraints.txt",
        "docs",
        "examples",
        "megapipe",
        "pyproject.toml",
        "scripts",
        "tests",
        "train.py",
    }
