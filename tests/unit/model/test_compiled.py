"""Compiled blocks: every gradient, with others in flight, in one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megapipe.assembly.kernels import select_kernels
from megapipe.config.config import Config
from megapipe.engine.stage import Stage
from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.resolve import resolve
from megapipe.ops.compiler import Compiler, torch_compile
from megapipe.optim.buffers import Bucket
from tests.parity.compiled_stages import (
    MB,
    SPLIT,
    Traced,
    assert_close,
    assert_like_uncompiled,
    check,
    model_of,
    run,
    stage_of,
    without_graphs,
)
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    with without_graphs():
        yield


def products(stage: Stage, bucket: Bucket) -> int:
    """Count the GEMMs of one micro-batch."""
    with FlopCounterMode(display=False) as counter:
        run(stage, bucket, "F0 I0 W0")
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.values())


@in_parts("policy", ["full", "stage"], default=2, full=1)
def test_a_product_that_nobody_needs_is_left_out(policy: str) -> None:
    """A recomputed block ends without its last product, compiled or not."""
    model = model_of("llama")

    def stage(compiler: Compiler | None) -> tuple[Stage, Bucket]:
        made, bucket = stage_of(model, compiler)
        if policy == "stage":
            return Stage(made.module, recompute=True), bucket
        span = BlockSpan(1, BlockPolicy(recompute=frozenset({"block"})))
        return Stage(made.module, [span, span]), bucket

    assert_close(run(*stage(Traced()), SPLIT), run(*stage(None), SPLIT), 1e-12)
    assert products(*stage(plain)) == products(*stage(None))


@in_parts("name", ["gpt2", "llama"], full=2)
def test_the_same_graphs_serve_all_blocks_of_all_stages(name: str) -> None:
    model, traced = model_of(name), Traced()
    check(model, traced)
    assert traced.graphs == 2, "one that keeps what the backward needs, one that keeps nothing"
    for _ in range(2):
        assert_like_uncompiled(model, traced, 1e-12)
    stage, _ = stage_of(model, traced)
    stage.evaluate((0, 0), torch.ones(8, 2, model.hidden, dtype=torch.float64), MB)
    assert traced.graphs == 2


def test_what_is_queued_is_let_go_by_W() -> None:
    stage, _ = stage_of(model_of("llama"), Traced())
    shape = (8, 2, stage.module.config.hidden)
    y = stage.forward((0, 0), torch.ones(shape, dtype=torch.float64), MB)
    assert y is not None
    stage.input_grad((0, 0), torch.ones_like(y))
    tasks = stage.queue.pending()[0, 0]
    held = [weakref.ref(tensor) for task in tasks for tensor in task.tensors()]
    assert len(held) == 16
    del tasks
    stage.weight_grad((0, 0))
    assert not any(tensor() is not None for tensor in held), "at once, without a collection"


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("documents", [False, True])
def test_the_check_passes_what_is_right(dtype: str, documents: bool) -> None:
    for name, again in (("gpt2", False), ("llama", True)):
        check(model_of(name, dtype), plain, documents=documents, again=again)


def overwritten(index: int) -> Compiler:
    """Return a compiler that writes over a layer's input once the next micro-batch runs."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        earlier: list[Tensor] = []

        def run(*args: Any) -> Any:
            y, inputs = function(*args)
            if earlier:
                earlier.pop().data.copy_(inputs[index])
            earlier.append(inputs[index])
            return y, inputs

        return run

    return compiler


def lost(index: int) -> Compiler:
    """Return a compiler that leads the gradient of a layer's output elsewhere."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: Any, x: Any, rotary: Any, mask: Any, linears: Any, skip_output: Any) -> Any:
            linears = list(linears)
            if linears[index].sink is not None:
                sink = torch.zeros_like(linears[index].sink).requires_grad_()
                linears[index] = linears[index]._replace(sink=sink)
            return function(block, x, rotary, mask, linears, skip_output)

        return run

    return compiler


LAYERS = ("qkv", "out", "up", "down")


@pytest.mark.parametrize(("index", "layer"), list(enumerate(LAYERS)))
def test_the_check_finds_what_is_written_over(index: int, layer: str) -> None:
    with pytest.raises(ConfigError, match=rf"the input (0 of {layer}|gradient 0) .* off"):
        check(model_of("gpt2", "bf16"), overwritten(index))


@pytest.mark.parametrize(("index", "layer"), list(enumerate(LAYERS)))
def test_the_check_finds_a_gradient_that_is_lost(index: int, layer: str) -> None:
    with pytest.raises(ConfigError, match=rf"the gradient 0 of {layer} of a compiled block is"):
        check(model_of("gpt2", "bf16"), lost(index))


def test_a_compiler_that_fails_is_one_line() -> None:
    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise RuntimeError("no compiler at hand\nat all")

        return run

    with pytest.raises(ConfigError, match=r"torch.compile fails: no compiler at hand; expected"):
        check(model_of("gpt2"), compiler)


@pytest.mark.parametrize(
    ("section", "values", "needs"),
    [
        ("model", {"dropout": 0.1}, "model.dropout=0, not 0.1"),
        ("pipeline", {"schedule": "seq1f1b", "sequence_slices": 2}, "whole sequences"),
        ("activations", {"policy": "selective"}, "activations.policy=keep, full or stage"),
        ("activations", {"policy": "full", "offload": ["norm"]}, r"activations.offload=\[\]"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    section: str, values: dict[str, Any], needs: str
) -> None:
    config = {section: values, "kernels": {"compile": True}, "train": {"global_batch": 8}}
    with pytest.raises(ConfigError, match=f"kernels.compile=true needs {needs}"):
        resolve(Config.model_validate(config), 1, None)


def test_kernels_of_a_compiled_block() -> None:
    cpu = torch.device("cpu")
    config, _ = resolve(Config.model_validate({"kernels": {"compile": True}}), 1, None)
    needs = model_spec_of(config).kernel_needs
    kernels = select_kernels(config, needs, cpu, torch.float32)
    assert kernels.compiler is torch_compile
    assert "blocks compiled (torch.compile)" in kernels.banner()
    for name, reason in (
        ("flex", "cannot be part of"),
        ("math", "gives wrong results when inductor"),
    ):
        only = config.kernels.only.model_copy(update={"attention": name})
        kernels_config = config.kernels.model_copy(update={"only": only})
        wanting = config.model_copy(update={"kernels": kernels_config})
        with pytest.raises(ConfigError, match=f"attention={name}: {reason}"):
            select_kernels(wanting, needs, cpu, torch.float32)
