"""What training needs is loaded quickly: heavy packages come in when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.tokens import TokenWriter

HEAVY = (
    "datasets",
    "matplotlib",
    "pyarrow",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers",
    "wandb",
)
"""Packages that take half a second and more each to load, or load one that does."""


def run_python(*statements: str) -> subprocess.CompletedProcess[str]:
    code = "; ".join(("import sys", *statements))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )


def modules_after(*statements: str) -> set[str]:
    return set(run_python(*statements, "print(*sys.modules)").stdout.split())


STAGES = {
    "the package": ("import megapipe", "dir(megapipe)"),
    "what it is asked for": ("megapipe.Pipeline, megapipe.spawn, megapipe.TrainStep",),
    "training": ("import megapipe.train.trainer, megapipe.train.job",),
    "kernels": (
        "import torch",
        "from megapipe.config.config import Config",
        "from megapipe.layout.resolve import resolve",
        "from megapipe.assembly.kernels import select_kernels",
        "config, layout = resolve(Config(), 1, None)",
        "needs = layout.model.kernel_needs",
        "kernels = select_kernels(config, needs, torch.device('cpu'), torch.float32)",
        "q = torch.randn(1, 4, 8, 16, requires_grad=True)",
        "kernels.attention(q, q, q, 0.0, None).sum().backward()",
    ),
}
"""Statements that one process runs; after each stage it reports what is loaded."""


@pytest.mark.full
def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    """No torch by the package alone, and by training no more than by torch; a model that attends
    over whole sequences needs no more either."""
    tell = "print(*sys.modules)"
    statements = [each for stage in STAGES.values() for each in (*stage, tell)]
    done = run_python(*statements)
    package, asked, training, kernels = (set(line.split()) for line in done.stdout.splitlines())
    assert "megapipe" in package
    assert "torch" not in package
    assert "megapipe.library.pipeline" in asked
    assert {"torch", "megapipe.train.train_step", "megapipe.train.kernel_selection"} <= training
    heavy = set(HEAVY) - modules_after("import torch")
    for stage, loaded in zip(STAGES, (package, asked, training, kernels), strict=True):
        assert not loaded & heavy, stage


@pytest.mark.parametrize("damaged", [False, True])
def test_token_files_are_looked_at_without_torch(tmp_path: Path, damaged: bool) -> None:
    """Sound or not, and within little memory, whatever a header declares."""
    prefix, out = tmp_path / "t", tmp_path / "out"
    with TokenWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(40):
            writer.add(np.full(50, 7))
    if damaged:
        with open(f"{prefix}.idx", "r+b") as index:
            index.seek(18)
            index.write((2**40).to_bytes(8, "little"))
    commands = (
        f"inspect {prefix} --tokenizer byte",
        f"verify {prefix} --tokenizer byte",
        f"verify {prefix} --vocab-size 9",
        f"merge {out} {prefix} {prefix}",
        f"split {prefix} {out}-a=1 {out}-b=1",
    )
    code = 3 if damaged else 0
    loaded = modules_after(
        "from megapipe.data.commands import main",
        *(f"assert main({command.split()}) == {code}" for command in commands),
        "status = open('/proc/self/status').read()",
        "assert int(status.split('VmHWM:')[1].split()[0]) < 100_000",  # KiB
    )
    assert "megapipe.data.tokens.join" in loaded
    assert not loaded.intersection((*HEAVY, "torch", "tokenizers"))
