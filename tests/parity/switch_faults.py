"""Mistakes in what does not depend on the layout: rules, types, state, dropout, compiling.

Each must make the parity check fail with the right message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.distributed.mesh import Axis
from megapipe.layers import dropout, linear
from megapipe.model.gpt import attention, block, compiled
from megapipe.model.gpt.stage import GPTStage
from megapipe.optim import optimizer, reduction, weight_prediction
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rules import elementwise, layerwise, muon
from megapipe.optim.rules.full_matrices import Function
from megapipe.optim.rules.rule import StateSlice
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import StatePolicy, StateStore
from megapipe.testing import World
from tests.parity.faults import norms_and_biases_decay, one_weight_gradient_dropped, scaled
from tests.parity.ranks import Case, Outcome, run_case

Patch = AbstractContextManager[Any]
SMALL = Case(layers=2)
DATA = replace(SMALL, dp=2)
TENSOR = replace(SMALL, tp=2)
FP32, BF16 = replace(SMALL, dtype="fp32"), replace(SMALL, dtype="bf16")
NARROW = replace(FP32, state_dtype="bf16")
DROPPING = replace(SMALL, dropout=0.2)
COMPILED = replace(SMALL, compile=True)


# Update rules.


def gradients_not_clipped() -> Patch:
    update = Optimizer.update
    return mock.patch.object(Optimizer, "update", lambda self, lr, factor=1.0: update(self, lr))


def every_step_is_the_first() -> Patch:
    """Correct the moments' bias as if there had been no step."""
    adam_step = elementwise.adam_step

    def wrong(
        kernel: Any, part: StateSlice, lr: float, count: int, *args: Any, **options: Any
    ) -> None:
        adam_step(kernel, part, lr, 0, *args, **options)

    return mock.patch.object(elementwise, "adam_step", wrong)


def momentum_is_not_nesterov_s() -> Patch:
    sgd = elementwise.sgd

    def wrong(*args: Any, **options: Any) -> None:
        sgd(*args, **options | {"nesterov": False})

    return mock.patch.object(elementwise, "sgd", wrong)


def lion_keeps_what_it_steps_by() -> Patch:
    """Use one decay rate for both of Lion's averages."""
    update = elementwise.Lion.update

    def wrong(self: Any, *args: Any) -> None:
        same = self.options.model_copy(update={"betas": [self.options.betas[0]] * 2})
        with mock.patch.object(self, "options", same):
            update(self, *args)

    return mock.patch.object(elementwise.Lion, "update", wrong)


def masters_are_ahead() -> Patch:
    """Write the predicted weights into the masters."""
    predict = weight_prediction.predict

    def wrong(rule: Any, shard: Shard, distance: float, count: int, out: Tensor) -> None:
        predict(rule, shard, distance, count, out)
        shard.store.write("model", 0, len(out), out)

    return mock.patch.object(optimizer, "predict", wrong)


def ahead_by_another_count() -> Patch:
    """Correct the moments with the count of the next update."""
    predict = weight_prediction.predict

    def wrong(rule: Any, shard: Shard, distance: float, count: int, out: Tensor) -> None:
        predict(rule, shard, distance, count + 1, out)

    return mock.patch.object(optimizer, "predict", wrong)


def trust_ratios_of_slices() -> Patch:
    return mock.patch.object(layerwise, "all_reduce", lambda tensor, axis: tensor)


def matrices_not_made_whole() -> Patch:
    def on_parts(regions: Any, specs: Any, tp: Axis, function: Function) -> Any:
        return [function(*each) for each in zip(regions, specs, strict=True)]

    return mock.patch.object(muon, "apply_to_full_matrices", on_parts)


# Types of the model, of gradients in flight, and of state.


def row_parallel_outputs_a_little_off() -> Patch:
    """Scale outputs by 1 + 1e-5: an error 170 times as large as a rounding of fp32."""
    return scaled(linear, "row_product", 1 + 1e-5)


def main_gradients_in_bf16() -> Patch:
    start_reduce = Shard.start_reduce

    def wrong(self: Shard) -> None:
        for grads in self.bucket.grads:
            grads.copy_(grads.bfloat16())
        start_reduce(self)

    return mock.patch.object(Shard, "start_reduce", wrong)


def loss_scale_left_in_the_gradients() -> Patch:
    finish_reduce = Optimizer.finish_reduce
    return mock.patch.object(Optimizer, "finish_reduce", lambda self, scale: finish_reduce(self))


def masters_lose_what_the_weights_lose() -> Patch:
    update = Optimizer.update

    def wrong(self: Optimizer, lr: float, factor: float = 1.0) -> None:
        update(self, lr, factor)
        for shard in self.shards:
            shard.store.read("model", 0, shard.stop - shard.start).copy_(shard.weights)

    return mock.patch.object(Optimizer, "update", wrong)


def masters_begin_with_rounded_weights() -> Patch:
    set_state = Shard.set_state
    return mock.patch.object(
        Shard, "set_state", lambda self, *args: set_state(self, *args[:2], args[2].bfloat16())
    )


def gradients_travel_as_they_are() -> Patch:
    start = reduction.Reduction.__init__
    return mock.patch.object(
        reduction.Reduction, "__init__", lambda self, *args: start(self, *args[:3], None)
    )


def gradients_added_up_as_they_travel() -> Patch:
    add_up = reduction._add_up
    return mock.patch.object(
        reduction,
        "_add_up",
        lambda received, axis, dtype: add_up(received, axis, received.dtype).to(dtype),
    )


def states_kept_in_fp32() -> Patch:
    make = StateStore.__init__

    def wrong(
        self: StateStore, weights: Tensor, names: Any, policy: StatePolicy, **where: Any
    ) -> None:
        make(self, weights, names, replace(policy, state_dtype="fp32"), **where)

    return mock.patch.object(StateStore, "__init__", wrong)


def states_rounded_towards_zero() -> Patch:
    def wrong(self: StateStore, name: str, out: Tensor, wide: Tensor, start: int) -> None:
        out.copy_((wide.view(torch.int32) & -0x10000).view(torch.float32))

    return mock.patch.object(StateStore, "_narrow", wrong)


def states_rounded_to_the_nearest() -> Patch:
    return mock.patch.object(StateStore, "_at_random", False)


# Dropout.


def _seeds(**same: int) -> Patch:
    """Draw random numbers that do not depend on some coordinates."""
    seed = dropout.dropout_seed

    def wrong(mb: Any, purpose: str, layer: int, tp_index: int) -> int:
        mb = replace(mb, step=same.get("step", mb.step), index=same.get("index", mb.index))
        return seed(mb, purpose, same.get("layer", layer), same.get("tp_index", tp_index))

    stack = ExitStack()
    for module in (dropout, attention):
        stack.enter_context(mock.patch.object(module, "dropout_seed", wrong))
    return stack


def the_same_dropped_in_every_step() -> Patch:
    return _seeds(step=0)


def the_same_dropped_of_every_micro_batch() -> Patch:
    return _seeds(index=0)


def the_same_dropped_in_every_layer() -> Patch:
    return _seeds(layer=0)


def the_same_dropped_on_every_tp_rank() -> Patch:
    return _seeds(tp_index=0)


def what_is_left_not_scaled_up() -> Patch:
    drop = block.dropout
    return mock.patch.object(
        block, "dropout", lambda x, p, *where: drop(x, p, *where) * (1 - p if p else 1)
    )


def dropout_in_validation() -> Patch:
    train = GPTStage.train
    return mock.patch.object(GPTStage, "train", lambda self, mode=True: train(self, True))


# Compiled blocks.


def _compiled(change: Callable[[Tensor, Any], tuple[Tensor, Any]]) -> Patch:
    run_block = compiled.run_block
    return mock.patch.object(compiled, "run_block", lambda *args: change(*run_block(*args)))


def compiled_output_a_little_off() -> Patch:
    return _compiled(lambda y, inputs: (y * (1 + 1e-8), inputs))


def compiled_inputs_of_linear_layers_written_over() -> Patch:
    return _compiled(lambda y, inputs: (y, [torch.zeros_like(inputs[0]), *inputs[1:]]))


FAULTS: dict[Callable[[], Patch], tuple[Case, str]] = {
    gradients_not_clipped: (replace(SMALL, rule="adam"), "optimizer.exp_avg|weight"),
    every_step_is_the_first: (replace(SMALL, rule="adam"), "weight"),
    momentum_is_not_nesterov_s: (replace(SMALL, rule="sgd"), "weight"),
    lion_keeps_what_it_steps_by: (replace(SMALL, rule="lion"), "optimizer.exp_avg"),
    norms_and_biases_decay: (replace(SMALL, rule="lion"), "weight .*(norm|bias)"),
    masters_are_ahead: (replace(SMALL, look_ahead=1), "weight"),
    ahead_by_another_count: (replace(SMALL, look_ahead=1), "weight ahead"),
    trust_ratios_of_slices: (replace(DATA, rule="lars"), "weight"),
    matrices_not_made_whole: (replace(TENSOR, rule="muon", dtype="bf16"), "the baseline's"),
    row_parallel_outputs_a_little_off: (replace(TENSOR, dtype="fp32"), "the baseline's|loss"),
    main_gradients_in_bf16: (FP32, "the baseline's"),
    one_weight_gradient_dropped: (BF16, "the baseline's"),
    loss_scale_left_in_the_gradients: (
        replace(SMALL, dtype="fp16", loss_scale=1024.0),
        "the baseline's",
    ),
    masters_lose_what_the_weights_lose: (BF16, "weight"),
    masters_begin_with_rounded_weights: (BF16, "not what it was set to"),
    gradients_travel_as_they_are: (replace(DATA, reduce_dtype="bf16"), "has travelled in bf16"),
    gradients_added_up_as_they_travel: (replace(DATA, reduce_dtype="bf16"), "gradient"),
    states_kept_in_fp32: (NARROW, "is not bf16"),
    states_rounded_towards_zero: (replace(NARROW, rounding="nearest"), "optimizer.exp_avg"),
    states_rounded_to_the_nearest: (NARROW, "no value was rounded to the farther"),
    the_same_dropped_in_every_step: (DROPPING, "loss"),
    the_same_dropped_of_every_micro_batch: (DROPPING, "loss"),
    the_same_dropped_in_every_layer: (DROPPING, "loss"),
    the_same_dropped_on_every_tp_rank: (replace(TENSOR, dropout=0.2), "loss"),
    what_is_left_not_scaled_up: (DROPPING, "loss"),
    dropout_in_validation: (DROPPING, "validation loss"),
    compiled_output_a_little_off: (COMPILED, "loss"),
    compiled_inputs_of_linear_layers_written_over: (COMPILED, "gradient"),
}
"""Faults, each with a case and the message of the check."""


def uncompiled() -> Patch:
    """Run compiled blocks uncompiled, and do not compare them with themselves first."""
    stack = ExitStack()
    stack.enter_context(
        mock.patch("megapipe.assembly.kernels.torch_compile", lambda function: function)
    )
    stack.enter_context(mock.patch("megapipe.model.gpt.compiled_check.check_compiled"))
    return stack


def run_faults(world: World, faults: Mapping[Callable[[], Patch], Case]) -> list[Outcome]:
    found = []
    for fault, case in faults.items():
        with uncompiled(), fault():
            found.append(run_case(world, case))
    return found


def run_right(world: World, cases: list[Case]) -> list[Outcome]:
    with uncompiled():
        return [run_case(world, case) for case in cases]
