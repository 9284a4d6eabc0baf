"""Compiled blocks: every gradient, with others in flight, in one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config import Config
from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Stage
from megapipe.errors import ConfigError
from megapipe.layers.linear import LinearTask
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, Sharding
from megapipe.layers.policy import BlockPolicy, Span
from megapipe.layout.family import family_of
from megapipe.layout.resolve import resolve
from megapipe.model.gpt import compiled
from megapipe.model.gpt.block import Block
from megapipe.model.gpt.compiled_check import check_compiled
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.partition import StageSpec
from megapipe.ops.compiler import Compiler, torch_compile
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import Bucket
from megapipe.train.kernels import select_kernels
from tests.parity import reference
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

pytestmark = pytest.mark.full

SPLIT = "F0 F1 F2 I0 F3 I1 W0 I2 I3 W1 W2 W3"
FUSED = "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
MB = MicroBatch(index=0, step=0, seed=1)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
    """The operations of `order` on micro-batches of 8 positions and 2 rows."""
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
    """Every tensor within `tolerance` of the largest of its own values."""
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


@pytest.mark.slow
def test_every_gradient_under_inductor() -> None:
    """Eight linear layers with biases, gates, rotary embeddings."""
    assert_like_uncompiled(model_of("mixed", "fp32"), torch_compile, 1e-5)


def two_in_one_graph(stage: Stage) -> None:
    """Let inductor see the stage's two blocks as one function of eight linear layers."""
    first, second = (cast(Block, block) for block in stage.module.layers)

    def both(x: Tensor, rotary: Any, linears: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, inputs = compiled.run_block(first, x, rotary, None, linears[:4], False)
        z, others = compiled.run_block(second, y, rotary, None, linears[4:], False)
        return z, (*inputs, *others)

    graph = torch_compile(both)
    layers = [
        layer
        for block in (first, second)
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down)
    ]

    def run_both(_block: Any, x: Tensor, _mb: Any, rotary: Any, _graph_only: bool) -> Tensor:
        harvest = compiled._Harvest(layers)
        sinks = compiled._Sinks.apply(x.new_empty(0).requires_grad_(), harvest, x)
        linears = [compiled._linear(*both) for both in zip(layers, sinks, strict=True)]
        y, harvest.inputs = graph(x, rotary, linears)
        return y

    def run_none(_block: Any, x: Tensor, *_rest: Any) -> Tensor:
        return x

    first.compiled, second.compiled = run_both, run_none


@pytest.mark.slow
def test_eight_linear_layers_in_one_graph_under_inductor() -> None:
    """What inductor may reuse spans both blocks, and micro-batches are in flight beside."""
    model = model_of("mixed", "fp32")
    right = run(*stage_of(model, None), SPLIT)
    stage, bucket = stage_of(model, None)
    two_in_one_graph(stage)
    assert_close(run(stage, bucket, SPLIT), right, 1e-5)


def products(stage: Stage, bucket: Bucket) -> int:
    """GEMMs of one micro-batch."""
    with FlopCounterMode(display=False) as counter:
        run(stage, bucket, "F0 I0 W0")
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.values())


@pytest.mark.parametrize("policy", ["full", "stage"])
def test_a_product_that_nobody_needs_is_left_out(policy: str) -> None:
    """A block that is run again ends without its last product, compiled or not."""
    model = model_of("llama")

    def stage(compiler: Compiler | None) -> tuple[Stage, Bucket]:
        made, bucket = stage_of(model, compiler)
        if policy == "stage":
            return Stage(made.module, recompute=True), bucket
        span = Span(1, BlockPolicy(recompute=frozenset({"block"})))
        return Stage(made.module, [span, span]), bucket

    assert_close(run(*stage(Traced()), SPLIT), run(*stage(None), SPLIT), 1e-12)
    assert products(*stage(plain)) == products(*stage(None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixed", "qwen", "neox", "bloom", "gemma"])
def test_every_gradient_under_inductor_in_fp64(name: str) -> None:
    assert_like_uncompiled(model_of(name), torch_compile, 1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
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


def check(
    model: ModelConfig, compiler: Compiler, *, documents: bool = False, again: bool = False
) -> None:
    kernels = Kernels(compiler=compiler)
    sharding = Sharding(Axis.alone(), False, TORCH_DTYPES[model.dtype], kernels=kernels)
    device = torch.device("cpu")
    check_compiled(
        model, sharding, length=8, rows=[2], again=again, documents=documents, device=device
    )


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("documents", [False, True])
def test_the_check_passes_what_is_right(dtype: str, documents: bool) -> None:
    for name, again in (("gpt2", False), ("llama", True)):
        check(model_of(name, dtype), plain, documents=documents, again=again)


def overwritten(index: int) -> Compiler:
    """The input of a layer is written over once the next micro-batch runs."""

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
    """The gradient of a layer's output goes elsewhere."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: Any, x: Any, rotary: Any, mask: Any, linears: Any, graph_only: Any) -> Any:
            linears = list(linears)
            if linears[index].sink is not None:
                sink = torch.zeros_like(linears[index].sink).requires_grad_()
                linears[index] = linears[index]._replace(sink=sink)
            return function(block, x, rotary, mask, linears, graph_only)

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

    with pytest.raises(ConfigError, match=r"compile fails here: no compiler at hand; expected"):
        check(model_of("gpt2"), compiler)


@pytest.mark.parametrize(
    ("section", "values", "needs"),
    [
        ("model", {"dropout": 0.1}, "model.dropout=0, not 0.1"),
        ("pipeline", {"schedule": "seq1f1b", "slices": 2}, "whole sequences"),
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
    needs = family_of(config).kernels
    kernels = select_kernels(config, needs, cpu, torch.float32)
    assert kernels.compiler is torch_compile
    assert "blocks compiled (torch.compile)" in kernels.banner()
    for name, reason in (("flex", "cannot be part of"), ("math", "is taken apart by inductor")):
        named = config.kernels.model_copy(update={"attention": name})
        wanting = config.model_copy(update={"kernels": named})
        with pytest.raises(ConfigError, match=f"attention={name}: {reason}"):
            select_kernels(wanting, needs, cpu, torch.float32)


KEPT: list[Tensor] = []


@torch.library.custom_op("megapipe_tests::kept_product", mutates_args=())
def kept_product(grad: Tensor, weight: Tensor) -> Tensor:
    KEPT.append(grad)
    return grad @ weight


@kept_product.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad @ weight


class KeptInside(Function):
    """A linear layer that keeps its gradient by an operation within the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight, rest[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return kept_product(grad, weight), None, None, torch.zeros_like(grad), None, None


def queue_kept(harvest: Any, _grads: Any) -> None:
    for layer, x in zip(reversed(harvest.layers), reversed(harvest.inputs), strict=True):
        layer.sharding.queue.put(LinearTask(layer, x, KEPT.pop(0)))


@pytest.mark.slow
def test_what_is_kept_inside_the_graph_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right as long as nothing reuses memory, and wrong under inductor."""
    monkeypatch.setattr(compiled, "_Product", KeptInside)
    monkeypatch.setattr(compiled._Harvest, "queue", queue_kept)
    model = model_of("mixed", "fp32")
    check(model, Traced())
    assert_like_uncompiled(model, Traced(), 1e-5)
    torch.compiler.reset()
    with pytest.raises(AssertionError, match=r"attention\.(qkv|out)\.weight after W0 is .* off"):
        assert_like_uncompiled(model, torch_compile, 1e-5)
    KEPT.clear()
    with pytest.raises(ConfigError, match=r"gradient 0 of out of a compiled block is .* off"):
        check(model, torch_compile)
