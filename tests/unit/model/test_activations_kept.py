"""What a block saves, recomputes or offloads: the same bits, and what is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megapipe.config.model import ModelConfig
from megapipe.engine.stage import Stage
from megapipe.layers import offload
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.norm import Norm
from megapipe.layers.offload import ActivationOffload
from megapipe.layers.recompute import StageInput, recompute, save_all
from megapipe.layers.weight_grad import WeightGradQueue, WeightGradTask
from megapipe.layout.activations import block_policies
from megapipe.model.gpt.attention import Attention
from megapipe.model.gpt.block import Block
from megapipe.model.gpt.mlp import MLP
from megapipe.model.partition import StageSpec
from tests.parity import reference
from tests.parity.ranks import OF_ALL_MODELS, Case, configure
from tests.parity.stage_cases import main_grads, new_pipeline, new_stage

LAYERS, ROWS, LENGTH = 3, 2, 8
MIDDLE = StageSpec(embedding=False, layers=range(LAYERS), head=False)
POLICIES = [name for name in OF_ALL_MODELS if name != "stage" and "attention kept" not in name]
"""Kept results of attention are those of attention by blocks, which is that of cp."""


def model_of(kind: str, **fields: Any) -> ModelConfig:
    return configure(Case(model=kind, tied=False, layers=LAYERS, **fields))[0].model


def spans_of(name: str, spec: StageSpec = MIDDLE) -> tuple[BlockSpan, ...]:
    config, _ = configure(Case(activations=name, moe="top 2"))
    return block_policies(config.activations, [spec])[0]


def microbatch(model: ModelConfig, index: int) -> MicroBatch:
    tokens, labels, mask = reference.random_batch(model, ROWS, LENGTH, seed=index, masked=0.3)
    return MicroBatch(index, 0, 1, tokens, labels, mask, scale=1 / 16)


def middle(model: ModelConfig, name: str) -> Stage:
    stage, _ = new_stage(model, reference.init_random(model, seed=3), MIDDLE, spans=spans_of(name))
    return stage


def hidden(model: ModelConfig, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(LENGTH, ROWS, model.hidden, generator=generator, dtype=torch.float64)
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[model.dtype]
    return values.to(dtype)


def run(model: ModelConfig, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run two micro-batches in flight through two stages, weight gradients last."""
    stages, buckets = new_pipeline(model, reference.init_random(model, seed=3), (1, 2))
    for stage, layers in zip(stages, (1, 2), strict=True):
        spec = StageSpec(embedding=False, layers=range(layers), head=False)
        stage.module.layers.use(spans_of(name, spec))
    x: Tensor | None
    for i in range(2):
        x = None
        for stage in stages:
            x = stage.forward((i, 0), x, microbatch(model, i))
    for i in range(2):
        x = None
        for stage in reversed(stages):
            x = stage.input_grad((i, 0), x)
    for i in range(2):
        for stage in stages:
            stage.weight_grad((i, 0))
    return [stages[-1].loss_sums[i, 0] for i in range(2)], main_grads(buckets)


@pytest.mark.parametrize("name", POLICIES)
def test_the_input_of_a_stage_is_a_leaf_unless_it_is_put_away(name: str) -> None:
    model = model_of("gpt2")
    stage = middle(model, name)
    stage.forward((0, 0), hidden(model), microbatch(model, 0))
    put_away = spans_of(name)[0].policy.offloads_input
    assert isinstance(stage._in_flight[0, 0][0], StageInput) == put_away


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("name", POLICIES)
def test_losses_and_gradients_are_the_same_bitwise(name: str, kind: str, norm: str) -> None:
    """One case differs: the CPU's rmsnorm hands its input two gradients. Autograd adds them to the
    residual's one by one where the norm is saved, and together where it is recomputed."""
    model = model_of(kind, dropout=0.3).model_copy(update={"norm": norm, "bias": False})
    plain_sums, plain = run(model, "keep")
    sums, grads = run(model, name)
    assert all(map(torch.equal, sums, plain_sums))
    assert grads.keys() == plain.keys()
    if norm == "rmsnorm" and any("norm" in span.policy.recompute for span in spans_of(name)):
        reference.assert_grads_close(grads, plain, 1e-13)
    else:
        assert all(grads[key].equal(plain[key]) for key in plain)
    assert all(grad.any() for key, grad in grads.items() if "position" not in key)


@pytest.mark.parametrize("name", POLICIES)
def test_a_backward_in_one_is_the_same_bitwise_and_lets_nothing_wait(name: str) -> None:
    model = model_of("llama", dropout=0.3)
    put, found = WeightGradQueue.put, []
    for in_one in (False, True):
        waiting = []

        def spy(queue: WeightGradQueue, task: WeightGradTask, waiting: Any = waiting) -> None:
            put(queue, task)
            waiting.append(len(queue.pending()[0, 0]))

        params = reference.init_random(model, seed=3)
        stage, bucket = new_stage(model, params, MIDDLE, spans=spans_of(name))
        stage.forward((0, 0), hidden(model), microbatch(model, 0))
        with mock.patch.object(WeightGradQueue, "put", spy):
            if in_one:
                x = stage.backward((0, 0), hidden(model, 1))
            else:
                x = stage.input_grad((0, 0), hidden(model, 1))
                stage.weight_grad((0, 0))
        assert waiting == ([0] * 4 * LAYERS if in_one else [*range(1, 4 * LAYERS + 1)])
        assert not stage.queue.pending()
        assert x is not None
        found.append((x, main_grads([bucket])))
    (one, grads), (other, others) = found
    assert one.equal(other)
    assert all(grads[key].equal(others[key]) for key in others)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of what a block is made of."""
    counts: Counter[str] = Counter()

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return wrapper

    with ExitStack() as patches:
        for name, owner, attribute in (
            ("block", Block, "forward"),
            ("norm", Norm, "forward"),
            ("attention", Attention, "_attend"),
            ("mlp_activation", MLP, "forward"),
            ("gemm", functional, "linear"),
        ):
            wrapper = spy(name, getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, wrapper))
        yield counts


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_run_again_is_so_once_and_in_the_input_gradient(name: str) -> None:
    model = model_of("gpt2")
    stage = middle(model, name)
    key = (0, 0)
    with counted() as forward:
        stage.forward(key, hidden(model), microbatch(model, 0))
    once = {"block": 1, "norm": 2, "attention": 1, "mlp_activation": 1, "gemm": 4}
    assert forward == {what: count * LAYERS for what, count in once.items()}
    with counted() as again:
        stage.input_grad(key, hidden(model))
    expected: Counter[str] = Counter()
    for blocks, policy in spans_of(name):
        for what, count in once.items():
            if "block" in policy.recompute or what in policy.recompute:
                expected[what] += count * blocks
        if "block" in policy.recompute:
            expected["gemm"] -= 1  # the last one makes the output, which nobody needs
    assert again == expected
    with counted() as later:
        stage.weight_grad(key)
    assert not later


def test_offloading_lets_go_of_the_message_that_came_in() -> None:
    for name, is_kept in (("keep", True), ("full", True), ("offload", False)):
        stage = middle(model_of("gpt2"), name)
        x = hidden(model_of("gpt2"))
        storage = weakref.ref(x.untyped_storage())
        stage.forward((0, 0), x, microbatch(model_of("gpt2"), 0))
        del x
        assert (storage() is not None) == is_kept, name


def test_a_stage_that_is_run_again_as_a_whole_runs_no_block_a_third_time() -> None:
    model = model_of("gpt2")
    params = reference.init_random(model, seed=3)
    config, _ = configure(Case(activations="full"))
    (spans,) = block_policies(config.activations, [MIDDLE], recomputed={0})
    stage, _ = new_stage(model, params, MIDDLE, spans=spans, recompute=True)
    with counted() as counts:
        stage.forward((0, 0), hidden(model), microbatch(model, 0))
        stage.input_grad((0, 0), hidden(model))
        stage.weight_grad((0, 0))
    assert counts["block"] == 2 * LAYERS


def test_evaluation_keeps_nothing() -> None:
    model = model_of("gpt2")
    for name in POLICIES:
        stage = middle(model, name)
        stage.begin(train=False)
        x = hidden(model)
        storage = weakref.ref(x.untyped_storage())
        y = stage.evaluate((0, 0), x, microbatch(model, 0))
        assert y is not None
        assert not y.requires_grad
        del x
        assert storage() is None


@pytest.mark.parametrize("inner", [save_all, recompute])
def test_two_views_of_one_storage_share_its_copy(inner: Any) -> None:
    host = ActivationOffload()

    def product(pair: Tensor, skip_output: bool = False) -> Tensor:
        left, right = pair.chunk(2)
        return left * right

    leaf = torch.arange(1.0, 9.0, requires_grad=True)
    pair = leaf * 1
    with mock.patch.object(offload, "_Copy", wraps=offload._Copy) as made:
        y = host.offload(inner, product, pair)
    assert made.call_count == 1
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]


def test_a_storage_that_is_freed_within_a_part_is_not_mistaken_for_another() -> None:
    """The memory of a saved tensor that is gone may be that of the next one."""
    host = ActivationOffload()

    def chain(x: Tensor, skip_output: bool = False) -> Tensor:
        for _ in range(20):
            x = x * x  # saves x, which nothing else holds on to
            x = x * 0.5
        return x

    results = []
    for how in (save_all, lambda *args: host.offload(save_all, *args)):
        leaf = torch.full((1 << 14,), 2.0, dtype=torch.float64)
        leaf[1::2] = 1.9999
        leaf.requires_grad_()
        how(chain, leaf * 1).sum().backward()
        results.append(leaf.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].equal(results[1])
