"""Names in docs/CONTRIBUTING.md and in the pages for newcomers exist; links of all documents lead
somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.keys import KEYS, OPTION_KEYS, SECTIONS, field_of
from megapipe.errors import ConfigError
from megapipe.schedule.generators import aliases, names
from tests.parity.pages import BLOCK, DOCS, commands, wrong_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8")
    for name in ("CONTRIBUTING.md", "from_megatron.md", "from_deepspeed.md", "from_others.md")
}
OF_A_RUN = ("log.jsonl",)
"""Files that look like keys and are in the run folder."""


def code_words(text: str) -> Iterator[list[str]]:
    """Yield the words of every piece of code in the running text and in tables."""
    for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        yield [word.rstrip(",") for word in span.replace(r"\|", "|").split()]


def is_setting(word: str) -> bool:
    """Whether a word is a key of the configuration, perhaps with a value."""
    section, dot, _ = word.partition(".")
    return bool(dot) and section in SECTIONS and not (ROOT / word).exists()


def wrong_settings(words: list[str]) -> Iterator[str]:
    """Yield keys that do not exist and values that are not accepted."""
    settings = [word for word in words if is_setting(word) and word not in OF_A_RUN]
    settings = [word for word in settings if ".NAME" not in word or not _named(word)]
    yield from (word for word in settings if word.partition("=")[0] not in {*KEYS, *OPTION_KEYS})
    given = [word for word in settings if "=" in word]
    try:
        schedule = parse(given).config.pipeline.schedule
    except ConfigError as error:
        yield str(error)
        return
    if ":" not in schedule and schedule not in {*names(), *aliases(), "auto"}:
        yield schedule


def _named(word: str) -> bool:
    """Whether a word is a key below a mapping, whose names are the user's."""
    return field_of(word.partition("=")[0]) is not None


def wrong_links(text: str, folder: Path = DOCS) -> Iterator[str]:
    """Yield links from a page in `folder` to files that do not exist, or to headings they lack."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, heading = target.partition("#")
        path = folder / name
        if not path.exists():
            yield target
            continue
        there = text if not name else path.read_text("utf-8") if path.suffix == ".md" else ""
        if heading not in {"", *headings(there)}:
            yield target


def headings(text: str) -> list[str]:
    """Return the headings of a page as links spell them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found]


def mistakes(text: str) -> list[str]:
    found = [*wrong_links(text)]
    for words in code_words(text):
        found += [*wrong_settings(words), *wrong_files(words)]
    return found


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [*wrong_links(page.read_text(encoding="utf-8"), page.parent)] == []


@pytest.mark.parametrize("name", PAGES)
def test_what_is_named_exists(name: str) -> None:
    assert sum(map(len, code_words(PAGES[name]))) > 50
    assert mistakes(PAGES[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "`optimizer.weight_decai`",
        "`--their-flag optimizer.zero=4`",
        "| `--flag` | `pipeline.chunks=2 pipeline.schedule=1f1c` | |",
        "`pipeline.stage_layout=[1,x]`",
        "a file `megapipe/optim/rule.py`",
        "[design](design.md#flours)",
        "[design](desine.md)",
    ],
)
def test_a_mistake_is_noticed(text: str) -> None:
    assert len(mistakes(text)) == 1


def test_what_is_no_setting_is_left_alone() -> None:
    text = "`train.py`, `log.jsonl`, `zero_optimization/stage`, `megatron/x.py`"
    assert mistakes(f"{text}\n```sh\nlog.x\n```\n") == []


def test_every_kind_of_command_is_shown() -> None:
    shown = {word for text in PAGES.values() for line in commands(text) for word in line.split()}
    assert shown >= {"train.py", "megapipe.launch", "pytest", "--dry-run", "--list", "--nproc"}
