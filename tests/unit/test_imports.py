"""The import rule of docs/design.md, read from the source."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from megapipe.console import COMMANDS, LOAD_TORCH
from tests.parity.package_files import ADAPTERS, FILES, KERNELS, OPTIONAL, PACKAGE, inside

MOST = 20
"""Files of the package that a file may import."""
ROOTS = {
    "megapipe.layout.resolve",
    "megapipe.model.gpt.model_spec",
    "megapipe.model.gpt.stage",
    "megapipe.plan.report",
    "megapipe.plan.run",
    "megapipe.schedule.generators",
    "megapipe.train.async_training.async_training",
    "megapipe.train.moe.expert_rebalancing",
    "megapipe.train.job",
    "megapipe.train.train_step",
    "megapipe.train.trainer",
}
"""Files that put parts together, and import more. The list may only get shorter."""

FLOORS = (
    "completion",
    "console",
    "library",
    "evaluate",
    "generate",
    "inference",
    "train",
    "convert",
    "observe",
    "optim",
    "plan",
    "assembly",
    "layout",
    "data",
    "cli",
    "engine",
    "model",
    "layers",
    "ops",
    "testing",
    "launch",
    "distributed",
    "checkpoint",
    "schedule",
    "context",
    "experts",
    "config",
    "watch",
    "command_line",
    "util",
    "errors",
    "text",
    "version",
)
"""Folders and single files of the package, the highest first: imports go down."""

SCHEDULE_LATER = {
    "megapipe.schedule.render.raster": "matplotlib",
    "megapipe.schedule.commands.show": "rich",
    "megapipe.schedule.search.solver": "ortools",
}
"""What each of these files may load, not to be imported but when it is asked for its result."""
MAY_COMMUNICATE = (
    "megapipe.distributed",
    "megapipe.engine.channels",
    "megapipe.launch",
    "megapipe.testing",
)
WITHOUT_GROUPS = {"megapipe.convert.dcp": "torch.distributed.checkpoint"}
"""Who may use a part of torch.distributed that needs no process group."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that `tree` imports anywhere, or uses as an attribute of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full in FILES or f"{full}.__init__" in FILES
                yield full if is_module or node.module == "torch" else node.module
        elif isinstance(node, ast.Attribute) and (
            node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield "torch.distributed"


def on_import(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that `tree` imports or uses when it is itself imported."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from statements(node.orelse)
                continue
            parts = [
                part
                for name in ("body", "orelse", "finalbody", "handlers")
                for part in getattr(node, name, [])
            ]
            if not parts:
                yield node
            for part in parts:
                yield from statements(part.body if isinstance(part, ast.ExceptHandler) else [part])

    for statement in statements(tree.body):
        yield from imports(statement)


class Imports(NamedTuple):
    """Modules that a file imports anywhere, and those of them that importing it imports."""

    anywhere: frozenset[str]
    early: frozenset[str]


@functools.cache
def imports_of_files() -> Mapping[str, Imports]:
    """Parse each file of the package, once for all tests."""
    found = {}
    for name, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Imports(frozenset(imports(tree)), frozenset(on_import(tree)))
    return found


EXAMPLE = """
import torch.distributed as dist
from torch import distributed
from megapipe.train import train_step
from megapipe.errors import ConfigError
if TYPE_CHECKING:
    import wandb
try:
    import datasets
except ImportError:
    import apex
class A:
    import transformers
def f():
    import tensorboard
    return torch.distributed.get_rank()
"""


def test_the_reading_of_imports() -> None:
    tree = ast.parse(EXAMPLE)
    early = ["torch.distributed"] * 2 + ["megapipe.train.train_step", "megapipe.errors"]
    late = ["datasets", "apex", "transformers"]
    assert list(on_import(tree)) == early + late
    assert sorted(imports(tree)) == sorted(
        [*early, *late, "wandb", "tensorboard", "torch.distributed"]
    )


def room(module: str) -> str:
    """Return the folder or file below the package that a module is in."""
    return module.split(".")[1]


def upward(importer: str, imported: Iterable[str]) -> list[str]:
    """Return the `imported` modules that are not below the room of the `importer`, or in it."""
    own = FLOORS.index(room(importer))
    inner = [name for name in imported if name.startswith("megapipe.")]
    return [name for name in inner if FLOORS.index(room(name)) < own]


def test_imports_between_rooms_go_down() -> None:
    seen = set()
    for name, own in imports_of_files().items():
        if name in ("megapipe.__init__", "megapipe.__main__"):
            continue
        seen.add(room(name))
        up = upward(name, own.anywhere)
        assert not up, f"{name} imports {up}: above it, see FLOORS"
    assert seen == set(FLOORS), "rooms without a floor, or floors without a room"


def test_one_upward_import_is_noticed() -> None:
    down = "from megapipe.layers import linear\nfrom megapipe.engine.stage import Stage\n"
    assert upward("megapipe.engine.pipeline", imports(ast.parse(down))) == []
    up = down + "def f():\n    from megapipe.train.train_step import TrainStep\n"
    assert upward("megapipe.engine.pipeline", imports(ast.parse(up))) == [
        "megapipe.train.train_step"
    ]
    assert upward(
        "megapipe.schedule.ir", ["numpy", "megapipe.errors", "megapipe.plan.step_time"]
    ) == ["megapipe.plan.step_time"]


def test_schedules_and_plans_need_no_package_but_numpy() -> None:
    seen = 0
    for name, own in imports_of_files().items():
        if not inside(name, ("megapipe.schedule", "megapipe.context", "megapipe.experts")):
            continue
        for module in own.anywhere:
            seen += 1
            package = module.partition(".")[0]
            if package == SCHEDULE_LATER.get(name):
                assert module not in own.early, f"{name} needs {module} to be imported"
            else:
                assert package in sys.stdlib_module_names | {"megapipe", "numpy"}, (
                    f"{name} imports {module}: numpy and the standard library are enough here"
                )
    assert seen


def test_who_may_communicate() -> None:
    users = set()
    for name, own in imports_of_files().items():
        free = tuple(part for room, part in WITHOUT_GROUPS.items() if inside(name, (room,)))
        used = {module for module in own.anywhere if inside(module, ("torch.distributed",))}
        if any(not inside(module, free) for module in used):
            users.add(name)
    assert "megapipe.distributed.mesh" in users
    assert not {name for name in users if not inside(name, MAY_COMMUNICATE)}


def test_optional_packages_are_not_needed_to_import() -> None:
    for name, own in imports_of_files().items():
        early = {module for module in own.early if inside(module, (*OPTIONAL, *ADAPTERS))}
        assert not early or inside(name, ADAPTERS), f"{name} imports {early} at module level"
        if not inside(name, ("megapipe.ops",)):
            kernels = {module for module in own.anywhere if inside(module, KERNELS)}
            assert not kernels, f"{name} imports {kernels}: that is for megapipe.ops"


def loads(module: str, seen: set[str]) -> set[str]:
    """Return the packages that a module of megapipe imports when it is imported; `seen` has the
    modules that were looked at."""
    found = set()
    parts = module.split(".")
    above = [f"{'.'.join(parts[:length])}.__init__" for length in range(1, len(parts) + 1)]
    for file in {*above, module} & FILES.keys() - seen:
        seen.add(file)
        for each in imports_of_files()[file].early:
            package = each.partition(".")[0]
            found |= {package} if package != "megapipe" else loads(each, seen)
    return found


def test_commands_that_load_torch_to_begin_with_say_so() -> None:
    heavy = {name for name, (of, _) in COMMANDS.items() if "torch" in loads(of, set())}
    assert heavy == set(LOAD_TORCH)
    for path in (PACKAGE.parent / "scripts").glob("*.py"):
        says = "        load_torch()\n" in path.read_text(encoding="utf-8")
        assert says == (path.stem in LOAD_TORCH), path


FROM_TESTS = re.compile(r"^\s*(?:from|import)\s+(tests\.[\w.]+)", re.MULTILINE)


def test_no_test_file_imports_from_another() -> None:
    """What several of them use is in a helper beside them, or in tests/parity."""
    tests = PACKAGE.parent / "tests"
    seen = 0
    for path in tests.rglob("*.py"):
        for module in FROM_TESTS.findall(path.read_text(encoding="utf-8")):
            seen += 1
            assert not module.rpartition(".")[2].startswith("test_"), path
    assert seen


def module_of(name: str) -> str:
    return name.removesuffix(".__init__")


@functools.cache
def imported_files() -> Mapping[str, frozenset[str]]:
    """Return the files that each file imports, in functions and for types too."""
    names = {module_of(name) for name in FILES}
    return {
        module_of(name): (frozenset(map(module_of, found.anywhere)) & names) - {module_of(name)}
        for name, found in imports_of_files().items()
    }


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return nodes that lead from one to the next and back to the first; empty if none do."""
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_stands_on_itself() -> None:
    """It does not do so through other files either: by imports in functions, or for types."""
    assert not circle(imported_files())
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})


def test_files_import_few_others_but_for_those_that_put_the_parts_together() -> None:
    many = {name: len(found) for name, found in imported_files().items() if len(found) > MOST}
    assert many.keys() <= ROOTS, "a file that knows so much is cut, or its parts get a room"
    assert many.keys() >= ROOTS, "this list may only get shorter: take these out"


def test_docstrings_say_what_things_are_or_do() -> None:
    files = {**FILES, **{str(path): path for path in (PACKAGE.parent / "scripts").glob("*.py")}}
    texts = ((name, path.read_text(encoding="utf-8")) for name, path in files.items())
    strings = (
        (name, node.value)
        for name, text in texts
        if '"What ' in text  # others have no such string, and are not parsed
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    evasive = [(name, text[:60]) for name, text in strings if text.startswith("What ")]
    assert not evasive, "a docstring begins with a subject or a verb"
