"""The import rule of docs/design.md, tried out in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.package_files import ADAPTERS, FILES, KERNELS, OPTIONAL, inside

WITHOUT_TORCH = (
    "megapipe.schedule",
    "megapipe.context",
    "megapipe.experts",
    "megapipe.plan",
    "megapipe.config.config",
    "megapipe.cli",
    "megapipe.util.dtypes",
    "megapipe.errors",
    "megapipe.config.keys",
    "megapipe.layers.activation_policy",
    "megapipe.layout",
    "megapipe.config.section",
    "megapipe.config.strict_yaml",
    "megapipe.config.update_rules",
    "megapipe.model.partition",
    *(f"megapipe.model.gpt.{name}" for name in ("config", "parameters", "flops")),
    *(f"megapipe.model.gpt.hf.{name}" for name in ("config", "parts", "table")),
    "megapipe.train.job",
    "megapipe.train.python_api",  # both load torch once they know the configuration
    "megapipe.launch.rendezvous",
    "megapipe.watch",
)
RUN_STAGES = (
    "megapipe.plan.run",
    "megapipe.plan.trace",
    "megapipe.plan.results",
    "megapipe.plan.kernels",
    "megapipe.plan.cuda_kernels",
)
"""Modules of the plan that run the program, with torch."""


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_configuration_schedules_and_plans_load_no_torch() -> None:
    inner = [name for name in FILES if inside(name, WITHOUT_TORCH) and name not in RUN_STAGES]
    names = [name.removesuffix(".__init__") for name in inner]
    assert len(names) > len(WITHOUT_TORCH)
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    loaded = run_python(code + "print(*sys.modules)").split()
    assert set(names) <= set(loaded)
    heavy = {"torch", "transformers", "datasets", "matplotlib", "rich", "ortools", "wandb"}
    assert not heavy & set(loaded)


EXPERTS = ("model.moe.num_experts=4", "parallel.dp=2", "parallel.ep=2", "plan.peak_tflops=1")
OPEN = ("experts.dispatch=auto", "experts.overlap_chunks=auto")


@pytest.mark.parametrize("more", [(), (*EXPERTS, *OPEN)], ids=["dense", "auto"])
def test_a_plan_of_measured_stages_loads_no_torch(more: tuple[str, ...], tmp_path: Path) -> None:
    """The first plan measures stages and MoE layers with torch, and the second one reads the
    results."""
    code = (
        f"import os, sys\nos.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}\n"
        "from megapipe.cli import parse\nfrom megapipe.layout.resolve import resolve\n"
        "from megapipe.plan.measurements import BY_UNITS\n"
        "from megapipe.plan.report import report\n"
        "keys = ['model.layers=2', 'model.hidden=16', 'model.heads=2', 'parallel.device=cpu']\n"
        f"given = parse([*keys, *{more}]).config\n"
        "report(*resolve(given, None, None, measure=BY_UNITS))\nprint('torch' in sys.modules)"
    )
    assert [run_python(code) for _ in range(2)] == ["True\n", "False\n"]


@pytest.mark.full
def test_everything_imports_without_the_optional_packages() -> None:
    """Modules import as they do where those packages are not installed."""
    names = [name.removesuffix(".__init__") for name in FILES if not inside(name, ADAPTERS)]
    blocked = [*OPTIONAL[:2], *OPTIONAL[3:], *KERNELS]
    code = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
        f"for name in {names}: importlib.import_module(name)\nprint('done')"
    )
    assert run_python(code) == "done\n"
