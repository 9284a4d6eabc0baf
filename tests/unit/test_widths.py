"""Help and what commands print, at 80 columns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from megapipe import console
from megapipe.command_line import Parser, subcommands
from megapipe.config.help import help_text
from megapipe.config.keys import KEYS, SECTIONS
from megapipe.schedule.commands import main as schedule

WIDTH = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def wide(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if len(line) > WIDTH]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for inner in subcommands(parser).values():
        yield from parsers(inner)


@pytest.mark.parametrize("name", [name for name in console.COMMANDS if name != "train"])
def test_help_on_each_command_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"megapipe {name}"])
    found = list(parsers(import_module(console.COMMANDS[name][0]).parser()))
    assert found
    for parser in found:
        assert not wide(parser.format_help()), parser.prog


def test_help_on_training_and_the_list_of_commands_fit() -> None:
    for topic in ("", "all", "lr", "norm", *SECTIONS, *KEYS):
        assert not wide(help_text(topic)), topic
    assert not wide(console.usage())


def test_a_long_command_in_an_example_goes_on_behind_a_backslash() -> None:
    command = """run.py folder --first "1 2" --words 'one two three four' --last here --and -b 5"""
    parser = Parser(prog="x", description=f"Words of a\nparagraph.\n\nexample: {command}\n  as is")
    shown = parser.format_help().partition("\n\n")[2].partition("\n\noptions")[0]
    assert shown.splitlines() == [
        "Words of a paragraph.",
        "",
        """example: run.py folder --first "1 2" --words 'one two three four' \\""",
        "             --last here --and -b 5",
        "  as is",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["list"],
        ["show", "dualpipe", "--ranks", "8", "--microbatches", "20"],
        ["simulate", "zb_v", "--ranks", "4", "--microbatches", "8"],
        ["compare", "--ranks", "4", "--microbatches", "8", "--activation-limit", "3"],
    ],
    ids=lambda argv: argv[0],
)
def test_schedules_fit(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule(argv) == 0
    assert not wide(capsys.readouterr().out)
