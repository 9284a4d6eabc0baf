"""The rules of style that the lint looks for in docstrings, comments and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.running import prose

CODE = '''\
"""{module}"""

NUMBER = 1
"""{attribute}"""


class Thing:
    """{thing}"""

    @property
    def size(self) -> int:
        """{member}"""
        return 1  # {comment}


def build() -> Thing:
    """{function}"""
    return Thing()


def test_it() -> None:
    """{test}"""
'''
RIGHT = {
    "module": "Things of one kind.",
    "attribute": "Number of things.",
    "thing": "A thing that has a size.",
    "member": "Size in bytes.",
    "comment": "in bytes",
    "function": "Return a thing.",
    "test": "A thing is built.",
}


def found_in(path: Path) -> list[str]:
    """Return what is found in a file, without its place."""
    each = [found for text in prose.texts(path) for found in prose.findings(text)]
    return [finding.why for finding in each]


@pytest.mark.parametrize(
    ("place", "words", "why"),
    [
        ("module", "Of things, the sizes.", "begins with 'Of'"),
        ("attribute", "Those of things.", "begins with 'Those'"),
        ("thing", "The same of another kind.", "begins with 'The same'"),
        ("member", "As the file says.", "begins with 'As'"),
        (
            "function",
            "The thing that is built.",
            "begins with 'The', not with a verb such as Return",
        ),
        ("function", "Bytes of a thing.", "begins with 'Bytes', not with a verb such as Return"),
        ("comment", "messages on their way", "'on their way': write in flight"),
        ("test", "A layer is run again.", "'is run again': write recomputed"),
        (
            "thing",
            "A class of the user's, which is called.",
            '"of the user\'s": write user-defined',
        ),
        ("module", f"A list: {'word ' * 46}end.", "a sentence of 49 words"),
        ("comment", "as Row 7.16 says", "cites 'Row 7.16', which nobody can look up"),
    ],
)
def test_each_rule(place: str, words: str, why: str, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(CODE.format(**RIGHT))
    wrong.write_text(CODE.format(**{**RIGHT, place: words}))
    assert found_in(right) == []
    (told,) = found_in(wrong)
    assert told.startswith(why)


def test_names_and_code_are_no_prose(tmp_path: Path) -> None:
    """A word between backticks is a name, and may be any."""
    named = {**RIGHT, "function": "Return ``wish``, which `homeward` has."}
    (tmp_path / "named.py").write_text(CODE.format(**named))
    assert found_in(tmp_path / "named.py") == []


def test_sentences_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Of headings nothing is said\\n\\nA sentence. Of others this one.\\n\\n"
        "| name | Those of a table |\\n|---|---|\\n| x | It is on its way. |\\n\\n"
        "```bash\\nOf code nothing\\n```\\n".replace("\\n", "\n")
    )
    assert found_in(page) == [
        "begins with 'Of'",
        "begins with 'Those of'",
        "'on its way': write in flight",
    ]


def test_the_expressions_are_those_of_the_glossary() -> None:
    page = prose.GLOSSARY.read_text(encoding="utf-8")
    rows = page.partition("| not | instead |")[2]
    assert len(prose.banned()) == len(re.findall(r"^\| `", rows, re.MULTILINE)) > 10


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(CODE.format(**{**RIGHT, "function": "The thing."}))
    assert prose.main([str(path)]) == 1
    assert "wrong.py:16: begins with 'The', not with a verb" in capsys.readouterr().out
    assert prose.main([str(tmp_path)]) == 1
    assert "wrong.py:16: begins with 'The', not with a verb" in capsys.readouterr().out
    path.write_text(CODE.format(**RIGHT))
    (tmp_path / "note.txt").write_text("no Python")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "broken.py").write_text("(")
    assert prose.main([str(path)]) == prose.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
