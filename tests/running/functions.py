"""Functions and other statements of a source file, by line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class Function:
    """Lines of a function or method, and of what is nested in it: bit n is set for line n."""

    span: int = 0
    """Lines, from the first decorator on."""
    body: int = 0
    """Lines that calls alone execute."""


@dataclass
class Source:
    """The parts of a source file."""

    functions: dict[str, Function]
    """Functions by name; a method's has its class before it. Several of one name are one."""
    statements: int
    """Lines of statements outside of functions, but for docstrings."""

    def functions_at(self, lines: int) -> list[str] | None:
        """Return the names of the functions that have any of these lines; None if other statements
        do."""
        if lines & self.statements:
            return None
        return [name for name, function in self.functions.items() if function.span & lines]


def parse(text: str) -> Source:
    """Find the parts of a source file."""
    found = Source({}, 0)
    for name, node in _statements(ast.parse(text).body, ""):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = found.functions.setdefault(name + node.name, Function())
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            function.span |= line_range(first, node.end_lineno)
            if node.body[0].lineno > node.lineno:  # else calls and the definition share a line
                function.body |= line_range(node.body[0].lineno, node.end_lineno)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            found.statements |= line_range(node.lineno, node.end_lineno)
    for function in found.functions.values():
        found.statements &= ~function.span
    return found


def line_range(first: int, last: int | None) -> int:
    """Return the bits of the lines from `first` to `last`."""
    assert last is not None
    return (1 << last + 1) - (1 << first)


def _statements(body: Sequence[ast.stmt], name: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield all statements outside of functions, each with the names of the classes that it is in.

    A class, or a statement with a body, stands for its first lines.
    """
    for node in body:
        inner = [
            statement
            for part in ("body", "orelse", "finalbody", "handlers")
            for child in getattr(node, part, [])
            for statement in (child.body if isinstance(child, ast.ExceptHandler) else [child])
        ]
        if not inner or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
            continue
        marks = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(mark.lineno for mark in marks)])
        yield name, ast.Pass(lineno=first, end_lineno=max(first, inner[0].lineno - 1))
        inside = f"{name}{node.name}." if isinstance(node, ast.ClassDef) else name
        yield from _statements(inner, inside)
