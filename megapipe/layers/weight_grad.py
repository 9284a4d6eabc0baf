"""Deferred weight gradients: what makes zero-bubble schedules possible.

A zero-bubble schedule (Qi et al., 2401.10241) needs the backward of a stage cut in two: ``I``
passes the gradient on to the previous stage, ``W`` computes the weight gradients later. Asking
autograd for the two halves means walking the graph twice, and a checkpointed forward would run
again for each parameter. Here the layers split their own backward instead: their autograd
function returns the input gradient and *queues* the weight gradient as a task that holds what
the GEMM needs. ``W`` runs the queued tasks, which add straight into the main gradient.

``B`` is ``I`` and ``W`` through the same kernels, so fused and split schedules agree bitwise. Only
that it lets each task run as soon as it comes (:attr:`WeightGradQueue.at_once`), or beside the next
collective of the backward, which then costs no time. In the last ``W`` or ``B`` before a reduction
a callback learns of each gradient (:attr:`WeightGradQueue.watch`) and may send it off early.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, cast

from torch import Tensor
from torch.nn import Parameter

from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate


class WeightGradTask(Protocol):
    """One layer's weight gradient for one micro-batch, ready to run."""

    @property
    def weight(self) -> Parameter:
        """The parameter whose gradient this is, with that of its bias if it has one."""

    def begin(self) -> None:
        """Begin to gather the operands over tp; without this call :meth:`run` gathers them."""

    def run(self) -> None:
        """Add the gradient into the parameter's main gradient."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the task keeps alive."""


GradObserver = Callable[[Parameter, Iterable[Parameter]], None]
"""Called with a parameter that has got a gradient, and those whose gradients are queued."""


class WeightGradQueue:
    """Tasks of one stage, kept per micro-batch in the order of the backward pass."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, list[WeightGradTask]] = {}
        self._filling: list[WeightGradTask] | None = None
        self.at_once = False
        """Run tasks instead of collecting them."""
        self.watch: GradObserver | None = None

    def open(self, key: Hashable) -> None:
        """Collect tasks for `key` from here on; a key's tasks are collected once."""
        assert key not in self._tasks, f"weight gradients of {key} are already queued"
        self._filling = self._tasks[key] = []

    def put(self, *tasks: WeightGradTask, later: bool = False) -> None:
        """Queue `tasks`, or run them if `at_once` is set. With `later` they wait even then: for the
        next collective (:meth:`run_postponed`), or the end of the backward."""
        assert self._filling is not None, "a backward pass ran outside the engine"
        if self.at_once and not later:
            self._run_in_turn(list(tasks))
        else:
            self._filling.extend(tasks)

    def run_postponed(self) -> None:
        """With `at_once`, run the tasks put for later, beside a collective that has begun."""
        if self.at_once and self._filling:
            self._run_in_turn(self._filling)

    def run(self, key: Hashable) -> None:
        """Compute the gradients of `key` and let go of the tensors that their tasks held."""
        self._run_in_turn(self._tasks.pop(key))

    def pending(self) -> dict[Hashable, list[WeightGradTask]]:
        """The tasks that are queued now, for inspection."""
        return self._tasks

    def clear(self) -> None:
        self._tasks.clear()
        self._filling = None
        self.at_once = False
        self.watch = None

    def _run_in_turn(self, tasks: list[WeightGradTask]) -> None:
        """Run and remove all tasks; while one computes, the operands of the next are gathered."""
        tasks.reverse()
        if tasks:
            tasks[-1].begin()
        while tasks:
            task = tasks.pop()
            if tasks:
                tasks[-1].begin()
            task.run()
            if self.watch is not None:
                put_off = (self._filling or []) if self.at_once else []
                self.watch(task.weight, [each.weight for each in (*tasks, *put_off)])


def main_grad(parameter: Parameter) -> Tensor:
    """The accumulator of a parameter: fp32 (fp64 for fp64), a view of its stage's buffer."""
    return cast(Any, parameter).main_grad


def add_product(
    parameter: Parameter,
    left: Tensor,
    right: Tensor,
    accumulate: AccumulateKernel = torch_accumulate,
) -> None:
    """main_grad += left^T @ right, for left [n, out] and right [n, in]."""
    grad = main_grad(parameter)
    accumulate(grad.view(-1, grad.shape[-1]), left, right)


def accumulate_in_main_grad(parameter: Parameter) -> None:
    """Let autograd's own gradient of `parameter` flow into its main gradient.

    For parameters whose gradient is too small to defer (norms): it is computed within ``I``.
    """

    def move(p: Tensor) -> None:
        assert p.grad is not None
        main_grad(cast(Parameter, p)).add_(p.grad)
        p.grad = None

    parameter.register_post_accumulate_grad_hook(move)
