"""Stages with compiled blocks, in several orders of operations, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, Sharding
from megapipe.model.gpt.compiled_check import check_compiled
from megapipe.model.partition import StageSpec
from megapipe.ops.compiler import Compiler
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import Bucket
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

SPLIT = "F0 F1 F2 I0 F3 I1 W0 I2 I3 W1 W2 W3"
FUSED = "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
MB = MicroBatch(index=0, step=0, seed=1)


class Traced:
    """Compiles to graphs that run uncompiled, with their backward, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


class Outcome(NamedTuple):
    outputs: list[Tensor]
    input_grads: list[Tensor]
    grads: list[dict[str, Tensor]]
    """Main gradients after each W."""


def model_of(name: str, dtype: str = "fp64", layers: int = 2) -> ModelConfig:
    model = configure(Case(tied=False, layers=layers, model=name, dtype=dtype))[0].model
    return model.model_copy(update={"init_std": 0.2})


def stage_of(model: ModelConfig, compiler: Compiler | None) -> tuple[Stage, Bucket]:
    spec = StageSpec(embedding=False, layers=range(model.layers), head=False)
    return new_stage(model, reference.init_random(model, seed=3), spec, compiler=compiler)


def run(stage: Stage, bucket: Bucket, order: str) -> Outcome:
    """Run the operations of `order` on micro-batches of 8 positions and 2 samples."""
    bucket.zero_grad()
    shape = (8, 2, stage.module.config.hidden)
    dtype = TORCH_DTYPES[stage.module.config.dtype]
    done = Outcome([], [], [])
    for kind, i in ((op[0], int(op[1:])) for op in order.split()):
        drawn = torch.randn(2, *shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        if kind == "F":
            y = stage.forward((i, 0), drawn[0], MB)
            assert y is not None
            done.outputs.append(y)
        elif kind == "I":
            grad = stage.input_grad((i, 0), drawn[1])
            assert grad is not None
            done.input_grads.append(grad)
        else:
            stage.weight_grad((i, 0))
            done.grads.append(main_grads([bucket]))
    return done


def assert_close(found: Outcome, right: Outcome, tolerance: float) -> None:
    """Assert every tensor within `tolerance` of the largest of its own values."""
    for i, (y, y_, x, x_) in enumerate(
        zip(found.outputs, right.outputs, found.input_grads, right.input_grads, strict=True)
    ):
        assert_tensor_close(f"output {i}", y, y_, tolerance)
        assert_tensor_close(f"input gradient {i}", x, x_, tolerance)
    for i, (grads, grads_) in enumerate(zip(found.grads, right.grads, strict=True)):
        assert grads.keys() == grads_.keys()
        for name in grads:
            assert_tensor_close(f"{name} after W{i}", grads[name], grads_[name], tolerance)


def assert_tensor_close(what: str, found: Tensor, right: Tensor, tolerance: float) -> None:
    largest = right.abs().max().item()
    assert largest > 0, f"{what}: nothing to compare"
    error = (found - right).abs().max().item() / largest
    assert error <= tolerance, f"{what} is {error:.1e} off"


def assert_like_uncompiled(model: ModelConfig, compiler: Compiler, tolerance: float) -> None:
    right = run(*stage_of(model, None), SPLIT)
    stage, bucket = stage_of(model, compiler)
    split, fused = run(stage, bucket, SPLIT), run(stage, bucket, FUSED)
    assert_close(split, right, tolerance)
    assert sum("weight" in name and "norm" not in name for name in right.grads[0]) >= 6
    one, other = split.grads[-1], fused.grads[-1]
    assert all(one[name].equal(other[name]) for name in one), "fused and split agree bitwise"


def check(
    model: ModelConfig, compiler: Compiler, *, documents: bool = False, again: bool = False
) -> None:
    kernels = Kernels(compiler=compiler)
    sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[model.dtype], kernels=kernels)
    device = torch.device("cpu")
    check_compiled(
        model, sharding, length=8, rows=[2], recompute=again, documents=documents, device=device
    )


@contextmanager
def without_graphs() -> Iterator[None]:
    """Forget compiled graphs before and after what is inside."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
