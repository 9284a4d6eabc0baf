"""The pictures in docs/ are what the project draws, and the links in the README lead somewhere."""

import re
from pathlib import Path

from megapipe.schedule.generators import build, names
from megapipe.schedule.render import svg

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_is_drawn_by_the_project() -> None:
    schedule = build("zb_h1", ranks=4, microbatches=8)
    assert (ROOT / "docs/zb_h1.svg").read_text() == svg(schedule)


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_the_docs_name_every_schedule() -> None:
    text = (ROOT / "docs/schedules.md").read_text()
    rows = text.partition("## The schedules")[2].partition("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("|")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(names())


def test_top_level_is_what_it_should_be() -> None:
    files = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    made = {"runs", "cache", "wandb", "build", "dist"}
    assert {name for name in files - made if not name.endswith(".egg-info")} == {
        "Dockerfile",
        "LICENSE",
        "README.md",
        "benchmarks",
        "configs",
        "constraints.txt",
        "docs",
        "megapipe",
        "pyproject.toml",
        "scripts",
        "tests",
        "train.py",
    }
