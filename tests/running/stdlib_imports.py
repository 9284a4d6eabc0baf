"""Check that the interpreter which runs this can compile files and has what they import.

Only imports of the standard library are looked at, so no package has to be installed. What a file
imports under `TYPE_CHECKING`, for another version of Python or inside `try ... except ImportError`
is left out. Reads {"files": [...], "modules": [...]} from standard input, where `modules` are the
names of the standard library of any version, and prints a line for each mistake.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def mistakes(path: str, modules: Collection[str]) -> Iterator[str]:
    """Describe what this version of Python lacks for a file."""
    source = Path(path).read_text(encoding="utf-8")
    try:
        compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}"
        return
    for node in imports(ast.parse(source)):
        for missing in lacking(node, modules):
            yield f"{path}:{node.lineno}: there is no {missing}"


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Find the imports that this version of Python would run."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    for child in running(node):
        yield from imports(child)


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that run under this version, or whose failure nobody catches."""
    if isinstance(node, ast.If) and (holds := condition(node.test)) is not None:
        yield from node.body if holds else node.orelse
    elif isinstance(node, ast.Try) and any(map(catches, node.handlers)):
        yield from (*node.handlers, *node.orelse, *node.finalbody)
    else:
        yield from ast.iter_child_nodes(node)


def condition(test: ast.expr) -> bool | None:
    """Decide a condition on the version or on `TYPE_CHECKING`; None: it is another one."""
    text = ast.unparse(test)
    if text.rpartition(".")[2] == "TYPE_CHECKING":
        return False
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    if names == {"sys"} and "sys.version_info" in text:
        return bool(eval(text, {"sys": sys}))
    return None


def catches(handler: ast.ExceptHandler) -> bool:
    """Whether it catches an import that fails."""
    if handler.type is None:
        return True
    return any(isinstance(node, ast.Name) and node.id in CAUGHT for node in ast.walk(handler.type))


def lacking(node: ast.Import | ast.ImportFrom, modules: Collection[str]) -> Iterator[str]:
    """Name what an import asks of the standard library in vain."""
    if isinstance(node, ast.Import):
        wanted = [(alias.name, "") for alias in node.names]
    elif node.module is None or node.level:
        return
    else:
        wanted = [(node.module, alias.name) for alias in node.names]
    for module, name in wanted:
        if module.partition(".")[0] in modules:
            full = f"{module}.{name}".rstrip(".*")
            if not exists(module, name) and not exists(full, ""):
                yield full


def exists(module: str, name: str) -> bool:
    """Whether a module can be imported and has the name, if one is given."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return name in ("", "*") or hasattr(found, name)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    modules = {*given["modules"], *sys.stdlib_module_names}
    found = [line for path in given["files"] for line in mistakes(path, modules)]
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
