"""Where a source file can be changed so that a test ought to notice, and how.

Each change is small and of a kind that people make: a comparison that lets one value more or less
through, a sign, an off-by-one, a condition turned round, a call forgotten. Words of error messages,
annotations, assertions (the strict of a zip among them) and docstrings are left alone: no
behaviour hangs on them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
IGNORED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One changed expression or statement of a file."""

    line: int
    """Line, counted from 1."""
    start: int
    stop: int
    """Range of the file's bytes that is replaced."""
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.line}: {self.before}  ->  {self.after}"


def mutants_of(source: bytes) -> list[Mutant]:
    """Return every change of a file, in source order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, changed in _changes(ast.parse(source)):
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(changed)
        if isinstance(node, ast.expr):
            after = f"({after})"
        found.append(Mutant(node.lineno, start, stop, ast.unparse(node), after))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.stop, mutant.after))


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes below `node`, itself included, each with what it becomes."""
    if isinstance(node, IGNORED) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    yield from ((node, changed) for changed in _changed(node))
    if isinstance(node, (ast.If, ast.While)):
        yield node.test, ast.Constant(False)
    if isinstance(node, ast.If):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            other.ops = [COMPARISONS[type(operator)]()]
            yield other
        case ast.BinOp() | ast.AugAssign() if type(other.op) in ARITHMETIC:
            other.op = ARITHMETIC[type(other.op)]()
            yield other
        case ast.BoolOp():
            other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
            yield other
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield other.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            yield other.orelse
            yield other.body
        case ast.Call(func=ast.Name(id=name)) if name in CALLS and len(other.args) >= 1:
            other.func = ast.Name(CALLS[name])
            yield other
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
