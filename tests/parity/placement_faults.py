"""Faults of expert replicas, seeded one at a time: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Parameter

from megapipe.layers.moe.experts import _ExpertsFunction
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.weight_grad import main_grad
from megapipe.optim.optimizer import Optimizer
from tests.parity.cases import Case
from tests.parity.faults import Patch

COPIED = Case(
    dp=2, ep=2, moe="top 2", masked=0.3, layers=2, placement="changing", steps=3, model="llama"
)
STAYING = replace(COPIED, placement="every second step", steps=4)


def gradients_of_copies_are_lost() -> Patch:
    return mock.patch.object(ExpertReplicas, "add_returned_grads")


def gradients_of_copies_are_added_twice() -> Patch:
    add = ExpertReplicas.add_returned_grads

    def wrong(self: ExpertReplicas, received: Tensor) -> None:
        add(self, received)
        add(self, received)

    return mock.patch.object(ExpertReplicas, "add_returned_grads", wrong)


def gradients_of_copies_are_those_of_earlier_steps_too() -> Patch:
    return mock.patch.object(ExpertReplicas, "zero_grad")


def gradients_of_the_owner_s_own_rows_are_lost() -> Patch:
    def wrong(self: ExpertReplicas, received: Tensor) -> None:
        owned = [expert for own in self._leaving() for expert in own]
        for number, tensors in self._parts(received, owned):
            for parameter, values in zip(self._parameters, tensors, strict=True):
                main_grad(parameter)[number].copy_(values)

    return mock.patch.object(ExpertReplicas, "add_returned_grads", wrong)


def weights_of_copies_are_one_step_old() -> Patch:
    """Send no weights after an update, unless the replicas change after it."""
    return mock.patch.object(Optimizer, "_mark_replicas_stale")


def weights_of_copies_leave_before_the_update() -> Patch:
    """Send new replicas the weights that were current when the last ones were sent."""
    begin = ExpertReplicas.start_broadcast

    def wrong(self: ExpertReplicas) -> None:
        if not self.replicas_per_rank or self._current:
            return
        now = [p.detach().clone() for p in self._parameters]
        before, self.before = getattr(self, "before", now), now  # type: ignore[attr-defined]
        parameters = self._parameters
        self._parameters = [Parameter(values) for values in before]
        begin(self)
        self._parameters = parameters

    return mock.patch.object(ExpertReplicas, "start_broadcast", wrong)


def slots_in_i_are_those_of_another_map() -> Patch:
    backward, weights = _ExpertsFunction.backward, ExpertReplicas.weights
    later = [False]

    def wrong(ctx: Any, grad: Tensor) -> Any:
        later[0] = True
        try:
            return backward(ctx, grad)
        finally:
            later[0] = False

    def of_slots(self: ExpertReplicas, parameter: Parameter) -> Tensor:
        found = weights(self, parameter)
        return found.roll(1, 0) if later[0] else found

    stack = ExitStack()
    stack.enter_context(mock.patch.object(_ExpertsFunction, "backward", staticmethod(wrong)))
    stack.enter_context(mock.patch.object(ExpertReplicas, "weights", of_slots))
    return stack


def copies_are_counted_in_the_norm() -> Patch:
    finish = Optimizer.finish_reduce

    def wrong(self: Optimizer, loss_scale: float = 1.0) -> Tensor:
        squares = finish(self, loss_scale)
        for stage, of_stage in self.replicas.items():
            for places in of_stage:
                squares[stage] += sum(grad.square().sum() for grad in places._grads.values())
        return squares

    return mock.patch.object(Optimizer, "finish_reduce", wrong)


def copies_send_their_gradients_after_the_reduction() -> Patch:
    finish, home = Optimizer.finish_reduce, Optimizer._return_replica_grads

    def wrong(self: Optimizer, loss_scale: float = 1.0) -> Tensor:
        with mock.patch.object(Optimizer, "_return_replica_grads"):
            squares = finish(self, loss_scale)
        home(self)
        return squares

    return mock.patch.object(Optimizer, "finish_reduce", wrong)


FAULTS: dict[Callable[[], Patch], Case] = {
    gradients_of_copies_are_lost: COPIED,
    gradients_of_copies_are_added_twice: COPIED,
    gradients_of_copies_are_those_of_earlier_steps_too: COPIED,
    gradients_of_the_owner_s_own_rows_are_lost: COPIED,
    weights_of_copies_are_one_step_old: STAYING,
    weights_of_copies_leave_before_the_update: COPIED,
    slots_in_i_are_those_of_another_map: COPIED,
    copies_are_counted_in_the_norm: COPIED,
    copies_send_their_gradients_after_the_reduction: replace(COPIED, dp=4, zero=1),
}
