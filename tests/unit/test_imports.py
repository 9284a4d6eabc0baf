"""The import rule of docs/design.md, read from the source and tried out."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megapipe

PACKAGE = Path(megapipe.__file__).parent
FILES = {
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Dotted name (a package's ends in ``.__init__``) -> file."""

MOST_LINES = 500

SCHEDULE_MAY = ("megapipe.schedule", "megapipe.errors")
PLAN_MAY = (
    *SCHEDULE_MAY,
    "megapipe.plan",
    "megapipe.section",
    "megapipe.config",
    "megapipe.model.config",
    "megapipe.model.partition",
    "megapipe.checks",  # notes on what a short run leaves out
    "megapipe.layout",  # the plan of a whole configuration starts from its layout
)
SCHEDULE_LATER = {
    "megapipe.schedule.render.raster": "matplotlib",
    "megapipe.schedule.commands.show": "rich",
    "megapipe.schedule.exact": "ortools",
}
"""What each of these files may load, not to be imported but when it is asked for its result."""
BELOW_TRAIN = (
    "checkpoint",
    "data",
    "engine",
    "model",
    "observe",
    "ops",
    "optim",
    "tensor_parallel",
)
MAY_COMMUNICATE = (
    "megapipe.launch",  # starts torch's agent
    "megapipe.axis",  # names the type of a group
    "megapipe.mesh",
    "megapipe.testing",
    "megapipe.tensor_parallel.collectives",
    "megapipe.engine.channels",
    "megapipe.optim",
    "megapipe.checkpoint",
    "megapipe.train",
)
WITHOUT_TORCH = (
    "megapipe.schedule",
    "megapipe.plan",
    "megapipe.config",
    "megapipe.cli",
    "megapipe.errors",
    "megapipe.keys",
    "megapipe.layout",
    "megapipe.section",
    "megapipe.strict_yaml",
    "megapipe.model.config",
    "megapipe.model.partition",
    "megapipe.model.hf_config",
    "megapipe.train.job",  # loads torch once the configuration is known to be right
    "megapipe.train.launch",
)
OPTIONAL = ("wandb", "tensorboard", "torch.utils.tensorboard", "datasets", "transformers")
KERNELS = ("apex", "flash_attn", "liger_kernel")


def inside(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that `tree` imports anywhere, or uses as an attribute of torch."""
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
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def on_import(tree: ast.Module) -> Iterator[str]:
    """The same, of what runs when the module is imported."""

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


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for name, path in FILES.items():
        yield name, ast.parse(path.read_text(encoding="utf-8"))


EXAMPLE = """
import torch.distributed as dist
from torch import distributed
from megapipe.train import step
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
    early = ["torch.distributed"] * 2 + ["megapipe.train.step", "megapipe.errors"]
    late = ["datasets", "apex", "transformers"]
    assert list(on_import(tree)) == early + late
    assert sorted(imports(tree)) == sorted(
        [*early, *late, "wandb", "tensorboard", "torch.distributed"]
    )


@pytest.mark.parametrize(
    ("package", "may"), [("megapipe.schedule", SCHEDULE_MAY), ("megapipe.plan", PLAN_MAY)]
)
def test_schedule_and_plan_import_nothing_above_them(package: str, may: tuple[str, ...]) -> None:
    seen = 0
    for name, tree in parsed():
        if not inside(name, (package,)):
            continue
        for module in imports(tree):
            seen += 1
            package_of = module.partition(".")[0]
            if package_of == "megapipe":
                assert inside(module, may), f"{name} imports {module}"
            elif package_of == SCHEDULE_LATER.get(name):
                assert module not in on_import(tree), f"{name} needs {module} to be imported"
            else:
                assert package_of in sys.stdlib_module_names | {"numpy"}, (
                    f"{name} imports {module}: numpy and the standard library are enough here"
                )
    assert seen


@pytest.mark.parametrize("package", BELOW_TRAIN)
def test_nothing_below_imports_train(package: str) -> None:
    names = [name for name in FILES if inside(name, (f"megapipe.{package}",))]
    assert names
    for name, tree in parsed():
        if name in names:
            assert not any(inside(module, ("megapipe.train",)) for module in imports(tree)), name


def test_who_may_communicate() -> None:
    users = {
        name
        for name, tree in parsed()
        if any(inside(module, ("torch.distributed",)) for module in imports(tree))
    }
    assert "megapipe.mesh" in users
    assert not {name for name in users if not inside(name, MAY_COMMUNICATE)}


def test_optional_packages_are_not_needed_to_import() -> None:
    for name, tree in parsed():
        early = {module for module in on_import(tree) if inside(module, OPTIONAL)}
        assert not early, f"{name} imports {early} at module level"
        if not inside(name, ("megapipe.ops",)):
            kernels = {module for module in imports(tree) if inside(module, KERNELS)}
            assert not kernels, f"{name} imports {kernels}: that is for megapipe.ops"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_configuration_schedules_and_plans_load_no_torch() -> None:
    names = [name.removesuffix(".__init__") for name in FILES if inside(name, WITHOUT_TORCH)]
    assert len(names) > len(WITHOUT_TORCH)
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    loaded = run_python(code + "print(*sys.modules)").split()
    assert set(names) <= set(loaded)
    heavy = {"torch", "transformers", "datasets", "matplotlib", "rich", "ortools", "wandb"}
    assert not heavy & set(loaded)


def test_everything_imports_without_the_optional_packages() -> None:
    """As where they are not installed."""
    names = [name.removesuffix(".__init__") for name in FILES]
    blocked = [*OPTIONAL[:2], *OPTIONAL[3:], *KERNELS]
    code = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
        f"for name in {names}: importlib.import_module(name)\nprint('done')"
    )
    assert run_python(code) == "done\n"


def test_files_are_short_enough_to_read_in_one_sitting() -> None:
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()
    }
    assert max(lengths.values()) <= MOST_LINES, max(lengths, key=lambda name: lengths[name])
