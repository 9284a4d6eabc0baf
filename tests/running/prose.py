"""Finds docstrings, comments and sentences of pages that break rules of style mechanically.

``python -m tests.running.prose`` looks at the whole repository, or at the files and folders that it
is given. Five kinds are found: the first word of a docstring, a function's docstring that is no
imperative, expressions that docs/glossary.md lists as not used, sentences of more than 45 words,
and citations of a list that nobody else has.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
LEFT_OUT = {GLOSSARY}
"""Pages that name what is not to be written."""
FOLDERS = ("megapipe", "benchmarks", "examples", "scripts", "tests", "docs")
REPOSITORY = [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *(ROOT / folder for folder in FOLDERS)]
"""Files and folders that are looked at if none are given."""
MOST_WORDS = 45

FIRST = re.compile(
    r"(Those|That|Of|By(?! default)|The same(?= (of|as|for|with|in|to|by|where)\b|[.,;:])|Its|As"
    r"|Likewise|In which|In whole|It is (that|those))\b"
)
FIRST_OF_A_PAGE = re.compile(r"(Of|Those of|The same of|In which|It is (that|those) of)\b")
NO_VERB = re.compile(
    r"(The|A|An|Each|Every|All|Which|How|Where|When|What|Who|Why|Some|Any|Both|In|From|For"
    r"|With|At|To|Numbers?(?= of)|Bytes|Seconds|Rows|Names|Whose|None|Nothing|Lines"
    r"|Values?(?= of))\b"
)
PRIVATE = re.compile(r"\bRows? \d+\.\d+")
PRAGMA = re.compile(r"#\s*(!|noqa|type:|pragma|fmt:|ruff:)")
CODE = re.compile(r"``?[^`]*``?")


class Text(NamedTuple):
    """A docstring, a comment or a sentence of a page."""

    path: Path
    line: int
    form: str
    """function, property, test, attribute, comment, page, or the kind of a node."""
    words: str


class Finding(NamedTuple):
    """A text that breaks a rule."""

    text: Text
    why: str

    def __str__(self) -> str:
        where = f"{os.path.relpath(self.text.path, ROOT)}:{self.text.line}"
        return f"{where}: {self.why}: {' '.join(self.text.words.split())[:100]}"


@functools.cache
def banned() -> Sequence[tuple[re.Pattern[str], str]]:
    """Return the expressions that the glossary lists as not used, and what stands instead."""
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [(re.compile(pattern.replace(r"\|", "|")), better) for pattern, better in rows]


def findings(text: Text) -> Iterator[Finding]:
    """Yield what is wrong with a text."""
    plain = CODE.sub("`x`", text.words).lstrip("*_ ")
    if text.form != "comment":
        first = FIRST_OF_A_PAGE if text.form == "page" else FIRST
        if match := first.match(plain):
            yield Finding(text, f"begins with {match[0]!r}")
        elif text.form == "function" and (match := NO_VERB.match(plain)):
            yield Finding(text, f"begins with {match[0]!r}, not with a verb such as Return")
    for pattern, better in banned():
        for match in pattern.finditer(plain):
            yield Finding(text, f"{match[0].strip()!r}: write {better}")
    if "\n  " not in text.words:  # a table or a list
        for sentence in sentences(plain.partition("Args:")[0]):
            count = len(re.findall(r"\w[\w'-]*", sentence))
            if count > MOST_WORDS:
                yield Finding(text, f"a sentence of {count} words")
    if match := PRIVATE.search(plain):
        yield Finding(text, f"cites {match[0]!r}, which nobody can look up")


def sentences(words: str) -> list[str]:
    """Split running text where a sentence ends and a capital follows."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`*\"'(])", " ".join(words.split()))


def texts(path: Path) -> Iterator[Text]:
    """Yield the texts of a file."""
    source = path.read_text(encoding="utf-8")
    yield from _of_page(path, source) if path.suffix == ".md" else _of_python(path, source)


def _of_python(path: Path, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if words := ast.get_docstring(node):
            yield Text(path, getattr(node, "lineno", 1), _form(node), words)
        for before, after in zip(node.body, node.body[1:], strict=False):
            value = getattr(after.value, "value", None) if isinstance(after, ast.Expr) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(value, str):
                yield Text(path, after.lineno, "attribute", value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.match(token.string):
            yield Text(path, token.start[0], "comment", token.string.lstrip("# "))


def _form(node: ast.AST) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return type(node).__name__
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return "property"
    return "test" if node.name.startswith("test") else "function"


def _of_page(path: Path, source: str) -> Iterator[Text]:
    """Yield the sentences of a page: no code, no headings, cells of tables one by one."""
    fences = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    source = fences.sub(lambda match: "\n" * match[0].count("\n"), source)
    for block in re.finditer(r"(?:^(?!\s*$).*\n?)+", source, re.MULTILINE):
        if all(line.startswith("    ") for line in block[0].splitlines()):
            continue  # code
        line = source.count("\n", 0, block.start()) + 1
        for part in re.split(r"\n(?=\s*(?:[-*|]|\d+\.)\s?)", block[0]):
            cells = part.split("|") if part.lstrip().startswith("|") else [part]
            for cell in cells:
                words = re.sub(r"^\s*([-*>]|\d+\.)\s+", "", cell)
                if words.strip() and not words.lstrip().startswith(("#", "![", ":--", "---")):
                    yield from (Text(path, line, "page", each) for each in sentences(words))
            line += part.count("\n") + 1


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files that are given, and all pages and Python files in folders that are given, but for
    hidden ones."""
    for path in paths:
        if path.is_dir():
            found = {*path.rglob("*.py"), *path.rglob("*.md")} - LEFT_OUT
            yield from (each for each in sorted(found) if "/." not in f"/{each.relative_to(path)}")
        elif path.exists() or path not in REPOSITORY:
            yield path


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is found; return 1 if there is something."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders (default: the repository)"
    )
    given = [path.resolve() for path in parser.parse_args(argv).paths] or REPOSITORY
    found = [each for path in files(given) for text in texts(path) for each in findings(text)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
