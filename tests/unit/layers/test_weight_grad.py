"""The queue of deferred weight gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapipe.distributed.mesh import Axis
from megapipe.layers.linear import ColumnParallelLinear
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import column_linear
from megapipe.layers.weight_grad import (
    WeightGradQueue,
    accumulate_in_main_grad,
    add_product,
    main_grad,
)
from megapipe.optim.buffers import Bucket, owned_parameters


@dataclass
class Task:
    """A task that notes its name when it begins, and how many of the tensors under watch are alive
    when it is run."""

    name: str
    log: list[str]
    held: Tensor = field(default_factory=lambda: torch.zeros(3))
    watched: list[weakref.ref[Tensor]] = field(default_factory=list)

    @property
    def weight(self) -> str:
        """Name that stands for a parameter."""
        return self.name

    def begin(self) -> None:
        self.log.append(f"({self.name}")

    def run(self) -> None:
        self.log.append(f"{self.name}{sum(ref() is not None for ref in self.watched)}")

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.held,)


def test_tasks_run_by_key_in_the_order_of_the_backward() -> None:
    queue, log = WeightGradQueue(), []
    for key in (0, 1):
        queue.open(key)
        for name in "ab":
            queue.put(Task(f"{name}{key}", log))
    assert {key: len(tasks) for key, tasks in queue.pending().items()} == {0: 2, 1: 2}
    queue.run(1)
    first = ["(a1", "(b1", "a10", "b10"]
    assert log == first, "the other micro-batch waits; b gathers while a computes"
    queue.run(0)
    assert log == [*first, "(a0", "(b0", "a00", "b00"]
    assert not queue.pending()


def test_tasks_that_run_at_once_are_not_held() -> None:
    queue, log = WeightGradQueue(), []
    queue.at_once = True
    queue.open(0)
    queue.put(first := Task("a", log))
    watched, name = weakref.ref(first.held), "b"
    del first
    queue.put(Task(name, log, watched=[watched]))
    both = ["(a", "a0", "(b", "b0"]
    assert log == both
    assert queue.pending() == {0: []}
    queue.run(0)
    assert log == both
    queue.at_once = False
    queue.open(1)
    queue.put(Task("c", log))
    queue.run_postponed()
    assert log == both, "I leaves them to W"
    queue.at_once = True
    queue.clear()
    assert not queue.at_once


def test_tasks_for_later_run_beside_the_next_collective_or_at_the_end() -> None:
    queue, log = WeightGradQueue(), []
    queue.at_once = True
    queue.open(0)
    queue.run_postponed()
    queue.put(Task("a", log), later=True)
    assert not log
    queue.run_postponed()
    assert log == ["(a", "a0"]
    queue.put(Task("b", log), later=True)
    queue.put(Task("c", log))
    assert log[2:] == ["(c", "c0"]
    queue.at_once = False
    queue.run(0)
    assert log[4:] == ["(b", "b0"]


def test_whoever_watches_learns_of_each_gradient_and_of_those_to_come() -> None:
    queue, log, told = WeightGradQueue(), list[str](), list[tuple[str, set[str]]]()

    def watch(weight: Any, queued: Iterable[Any]) -> None:
        assert log[-1] == f"{weight}0", "its own is there"
        told.append((weight, {*queued}))

    queue.open(0)
    queue.put(Task("a", log), Task("b", log), Task("c", log))
    queue.watch = watch
    queue.run(0)
    assert told == [("a", {"b", "c"}), ("b", {"c"}), ("c", set())]
    told.clear()
    queue.at_once = True
    queue.open(1)
    queue.put(Task("a", log), later=True)
    queue.put(Task("b", log), Task("c", log))
    assert told == [("b", {"a", "c"}), ("c", {"a"})], "those that were put off come later"
    queue.run_postponed()
    assert told[2:] == [("a", set())]
    queue.clear()
    assert queue.watch is None


def test_each_key_is_filled_once_and_run_once() -> None:
    queue = WeightGradQueue()
    queue.open(3)
    with pytest.raises(AssertionError, match="3 are already queued"):
        queue.open(3)
    queue.run(3)
    with pytest.raises(KeyError):
        queue.run(3)
    queue.open(3)  # the next step's


def test_a_backward_outside_the_engine_is_an_error() -> None:
    queue = WeightGradQueue()
    with pytest.raises(AssertionError, match="outside the engine"):
        queue.put(Task("a", []))
    queue.open(0)
    queue.clear()
    with pytest.raises(AssertionError, match="outside the engine"):
        queue.put(Task("a", []))


def test_tensors_are_let_go_task_by_task() -> None:
    queue, log = WeightGradQueue(), []
    watched: list[weakref.ref[Tensor]] = []
    queue.open(0)
    for name in "abc":
        task = Task(name, log, watched=watched)
        watched.append(weakref.ref(task.held))
        queue.put(task)
    del task
    queue.run(0)
    runs = [entry for entry in log if "(" not in entry]
    assert runs == ["a3", "b2", "c1"], "when b runs, what a held is gone"
    assert all(ref() is None for ref in watched)


def new_layer(dtype: torch.dtype = torch.float64) -> tuple[ColumnParallelLinear, Bucket]:
    layer = ColumnParallelLinear(
        Sharding(Axis.alone(), False, dtype), *column_linear("a", (6, 4), bias=True, std=0.1)
    )
    bucket = Bucket(0, list(owned_parameters(layer)), Axis.alone(), torch.device("cpu"))
    bucket.weights.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0)))
    return layer, bucket


@pytest.mark.parametrize("recompute", [False, True])
def test_main_gradients_reach_the_parameter_under_checkpointing(recompute: bool) -> None:
    """Recomputation hands the backward an alias of the saved tensors; the layer itself is kept."""
    layer, bucket = new_layer()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 2, 6, generator=generator, dtype=torch.float64)
    forwards = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        return layer(x).tanh()

    y = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
    queue = layer.sharding.queue
    queue.open(0)
    torch.autograd.backward([y], [grad])
    assert forwards == 1 + recompute, "the forward runs again once, not once per parameter"
    assert not bucket.grads[0].any()
    queue.run(0)

    weight, bias = layer.weight.detach().requires_grad_(), layer.bias.detach().requires_grad_()
    plain = x.detach().requires_grad_()
    torch.nn.functional.linear(plain, weight, bias).tanh().backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(main_grad(layer.weight), weight.grad)
    torch.testing.assert_close(main_grad(layer.bias), bias.grad)
    assert layer.weight.grad is None, "autograd itself keeps none"


def test_products_add_up_in_the_main_gradients_type() -> None:
    """bf16 operands: each product is rounded once, the sum is kept in fp32."""
    layer, _ = new_layer(torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    pairs = [
        (torch.randn(9, 6, generator=generator).bfloat16(), torch.randn(9, 4).bfloat16())
        for _ in range(3)
    ]
    for left, right in pairs:
        add_product(layer.weight, left, right)
    assert main_grad(layer.weight).dtype == torch.float32
    expected = sum((left.t() @ right).float() for left, right in pairs)
    assert main_grad(layer.weight).equal(expected)


def test_a_stack_of_matrices_gets_one_product() -> None:
    sharding = Sharding(Axis.alone(), False, torch.float64)
    layer = ColumnParallelLinear(sharding, *column_linear("a", (2, 3, 4), bias=False, std=0.1))
    Bucket(0, list(owned_parameters(layer)), Axis.alone(), torch.device("cpu"))
    left, right = torch.randn(5, 6).double(), torch.randn(5, 4).double()
    add_product(layer.weight, left, right)
    assert main_grad(layer.weight).shape == (2, 3, 4)
    torch.testing.assert_close(main_grad(layer.weight).flatten(0, 1), left.t() @ right)


def test_autograds_own_gradients_move_into_the_main_gradients() -> None:
    layer, _ = new_layer(torch.bfloat16)
    bias = layer.bias
    assert bias is not None
    accumulate_in_main_grad(bias)
    for _ in range(2):
        (bias * 3).sum().backward()
    assert bias.grad is None
    assert main_grad(bias).equal(torch.full((6,), 6.0))
