"""Deferred weight gradients: the basis of zero-bubble schedules.

A zero-bubble schedule (Qi et al., 2401.10241) needs the backward of a stage cut in two: ``I``
passes the gradient on to the previous stage, ``W`` computes the weight gradients later. Asking
autograd for the two halves would walk the graph twice, and recompute a checkpointed forward for
each parameter. Instead, the layers split their own backward: their autograd function returns the
input gradient and *queues* the weight gradient as a task that holds what the GEMM needs. ``W`` runs
the queued tasks, which add straight into the main gradient.

``B`` runs the kernels of ``I`` and ``W``, so fused and split schedules agree bitwise. But ``B``
runs each task as soon as it is queued (:attr:`WeightGradQueue.at_once`), or during the next
collective of the backward, where it costs no time. In the last ``W`` or ``B`` before a reduction, a
callback (:attr:`WeightGradQueue.watch`) may start to reduce each complete gradient.
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
        """Weight whose gradient the task computes, with the gradient of the layer's bias if any."""

    def begin(self) -> None:
        """Start to gather the operands over tp; without this call :meth:`run` gathers them."""

    def run(self) -> None:
        """Add the gradient into the parameter's main gradient."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the task holds."""


GradObserver = Callable[[Parameter, Iterable[Parameter]], None]
"""Callback (parameter, queued): a task has added to the gradient of `parameter`; `queued` has the
weights of the tasks that are still to run."""


class WeightGradQueue:
    """Weight-gradient tasks of one stage, by micro-batch, in the order of the backward."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, list[WeightGradTask]] = {}
        self._filling: list[WeightGradTask] | None = None
        self.at_once = False
        """Whether tasks run as soon as they are put, as in ``B``, instead of waiting for ``W``."""
        self.watch: GradObserver | None = None

    def open(self, key: Hashable) -> None:
        """Queue the next tasks under `key` of a micro-batch or slice; each key is opened once."""
        assert key not in self._tasks, f"weight gradients of {key} are already queued"
        self._filling = self._tasks[key] = []

    def put(self, *tasks: WeightGradTask, later: bool = False) -> None:
        """Queue `tasks`, or run them if `at_once` is set. With `later`, queue them even then, until
        the next collective (:meth:`run_postponed`) or the end of the backward."""
        assert self._filling is not None, "a backward pass ran outside the engine"
        if self.at_once and not later:
            self._run_in_turn(list(tasks))
        else:
            self._filling.extend(tasks)

    def run_postponed(self) -> None:
        """Run the tasks that :meth:`put` queued with `later`, if `at_once` is set. A collective is
        in flight meanwhile."""
        if self.at_once and self._filling:
            self._run_in_turn(self._filling)

    def run(self, key: Hashable) -> None:
        """Run the tasks queued under `key`, and free the tensors that they held."""
        self._run_in_turn(self._tasks.pop(key))

    def pending(self) -> dict[Hashable, list[WeightGradTask]]:
        """Return the queued tasks, for inspection."""
        return self._tasks

    def clear(self) -> None:
        self._tasks.clear()
        self._filling = None
        self.at_once = False
        self.watch = None

    def _run_in_turn(self, tasks: list[WeightGradTask]) -> None:
        """Run and remove all tasks; during each, the next task's operands are gathered."""
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
    """Return a parameter's main gradient: fp32 (fp64 for fp64), a view of its stage's buffer."""
    return cast(Any, parameter).main_grad


def add_product(
    parameter: Parameter,
    left: Tensor,
    right: Tensor,
    accumulate: AccumulateKernel = torch_accumulate,
) -> None:
    """Add left^T @ right to the main gradient, for left [n, out] and right [n, in]."""
    grad = main_grad(parameter)
    accumulate(grad.view(-1, grad.shape[-1]), left, right)


def accumulate_in_main_grad(parameter: Parameter) -> None:
    """Make every backward add autograd's gradient of `parameter` to its main gradient.

    Used for parameters whose gradients are too small to defer (norms): ``I`` computes them.
    """

    def move(p: Tensor) -> None:
        assert p.grad is not None
        main_grad(cast(Parameter, p)).add_(p.grad)
        p.grad = None

    parameter.register_post_accumulate_grad_hook(move)
