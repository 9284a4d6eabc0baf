"""What training needs is loaded quickly: heavy packages come in when they are used."""

from __future__ import annotations

import subprocess
import sys

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
"""Half a second and more each, or what loads one of these."""


def modules_after(*statements: str) -> set[str]:
    code = "; ".join(("import sys", *statements, "print(*sys.modules)"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_package_loads_no_torch_before_it_is_asked_for_something() -> None:
    assert "torch" not in modules_after("import megapipe", "dir(megapipe)")
    asked = modules_after(
        "import megapipe", "megapipe.Pipeline, megapipe.spawn, megapipe.TrainStep"
    )
    assert "megapipe.library.pipeline" in asked
    assert not asked.intersection(HEAVY) - modules_after("import torch")


def test_training_loads_nothing_heavy() -> None:
    loaded = modules_after("import megapipe.train.trainer, megapipe.train.job")
    assert {"torch", "megapipe.train.step", "megapipe.train.kernels"} <= loaded
    assert not loaded.intersection(HEAVY) - modules_after("import torch")


def test_choosing_kernels_loads_nothing_heavy() -> None:
    """A model that attends over whole sequences needs no more than the import did."""
    loaded = modules_after(
        "import torch",
        "from megapipe.config import Config",
        "from megapipe.layout.resolve import resolve",
        "from megapipe.train.kernels import select_kernels",
        "config, layout = resolve(Config(), 1, None)",
        "needs = layout.model.kernels",
        "kernels = select_kernels(config, needs, torch.device('cpu'), torch.float32)",
        "q = torch.randn(1, 4, 8, 16, requires_grad=True)",
        "kernels.attention(q, q, q, 0.0, None).sum().backward()",
    )
    assert not loaded.intersection(HEAVY) - modules_after("import torch")
