"""Faults that the field has really had, seeded one at a time: parity has to notice each.

Every fault is a patch of one place in the package, applied inside the ranks of a test world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity import Case, Outcome, run_case
from torch import Tensor

from megapipe.engine import channels as channels_module
from megapipe.engine.executor import Executor
from megapipe.engine.stage import Stage
from megapipe.mesh import Axis
from megapipe.model import gpt
from megapipe.optim import buffers, zero
from megapipe.optim.zero import Optimizer, Shard
from megapipe.tensor_parallel import linear
from megapipe.tensor_parallel.embedding import PositionEmbedding
from megapipe.testing import World
from megapipe.train.step import TrainStep

Patch = AbstractContextManager[Any]
TENSOR = Case(tp=2, m=3)
PIPELINE = Case(pp=2, m=3)
DATA = Case(dp=2, m=2)
SEQUENCE = replace(TENSOR, sequence_parallel=True)


def tied_uses_not_added() -> Patch:
    return mock.patch.object(buffers.Bucket, "add_uses")


def tied_gradient_not_reduced_over_its_holders() -> Patch:
    """Each holder reduces over dp only, as if the other stage's use did not exist."""
    make = buffers.make_buckets
    return mock.patch(
        "megapipe.train.step.make_buckets",
        lambda *args, **kwargs: make(*args, **{**kwargs, "holders": [0]}),
    )


def replicated_parameters_counted_on_every_tp_rank() -> Patch:
    square = Optimizer._own_square

    def wrong(self: Optimizer, shard: Shard, grads: Tensor) -> Tensor:
        alone = mock.Mock(tp=Axis.alone())
        with mock.patch.object(self, "mesh", alone):
            return square(self, shard, grads)

    return mock.patch.object(Optimizer, "_own_square", wrong)


def one_weight_gradient_dropped() -> Patch:
    run = Stage.weight_grad

    def wrong(self: Stage, microbatch: int) -> None:
        if microbatch == 1:
            self.queue._tasks.pop(microbatch)
        else:
            run(self, microbatch)

    return mock.patch.object(Stage, "weight_grad", wrong)


def weight_gradients_overwritten_instead_of_added() -> Patch:
    add = linear.add_product

    def wrong(parameter: Any, left: Tensor, right: Tensor) -> None:
        parameter.main_grad.zero_()
        add(parameter, left, right)

    return mock.patch.object(linear, "add_product", wrong)


def microbatches_swapped_between_stages() -> Patch:
    """The last stage takes the labels of another micro-batch than its input's."""
    forward = Stage.forward
    begin = Executor.begin

    def remember(self: Executor, microbatches: Any) -> None:
        for stage in self.stages.values():
            stage.all = microbatches  # type: ignore[attr-defined]
        begin(self, microbatches)

    def wrong(self: Stage, microbatch: int, x: Any, mb: Any) -> Any:
        if self.is_last:
            other = self.all[microbatch - 1]  # type: ignore[attr-defined]
            mb = replace(mb, labels=other.labels)
        return forward(self, microbatch, x, mb)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Executor, "begin", remember))
    stack.enter_context(mock.patch.object(Stage, "forward", wrong))
    return stack


def wrong_denominator() -> Patch:
    """Each micro-batch takes the mean over its own tokens, as if all had as many."""
    fetch = TrainStep._fetch

    def wrong(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        microbatches, count = fetch(self, *args, **kwargs)
        share = len(microbatches) * self.layout.dp
        return [
            replace(mb, scale=1.0 / (share * max(1, int(mb.mask.sum()))))
            for mb in microbatches
            if mb.mask is not None
        ] or microbatches, count

    return mock.patch.object(TrainStep, "_fetch", wrong)


def token_count_of_one_replica_only() -> Patch:
    """The denominator is the replica's own count: the gradient grows with dp."""
    fetch = TrainStep._fetch

    def wrong(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        microbatches, count = fetch(self, *args, **kwargs)
        return [replace(mb, scale=mb.scale * self.layout.dp) for mb in microbatches], count

    return mock.patch.object(TrainStep, "_fetch", wrong)


def stale_receive_buffer() -> Patch:
    """From the second message on a receive returns the buffer of the one before."""
    receive = channels_module.ProcessGroupChannels.receive

    def wrong(self: Any, action: Any) -> Tensor:
        tensor = receive(self, action)
        last = getattr(self, "last", tensor)
        self.last = tensor
        return last

    return mock.patch.object(channels_module.ProcessGroupChannels, "receive", wrong)


def sequence_partial_gradients_not_summed() -> Patch:
    return mock.patch.object(Optimizer, "_sum_sequence_parts")


def padded_logits_in_the_softmax() -> Patch:
    right = gpt.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        return right(logits, labels, tp, logits.shape[-1] * tp.size)

    return mock.patch.object(gpt, "vocab_parallel_cross_entropy", wrong)


def gradients_not_zeroed() -> Patch:
    return mock.patch.object(Optimizer, "zero_grad")


def gradients_not_reduced_over_replicas() -> Patch:
    def wrong(self: Shard) -> Tensor:
        return self.bucket.grads[0][self.start : self.stop]

    return mock.patch.object(Shard, "reduce", wrong)


def clipped_by_the_local_norm() -> Patch:
    """Each rank clips by what it owns itself."""

    @contextmanager
    def patches() -> Iterator[None]:
        update = Optimizer.update

        def wrong(self: Optimizer, lr: float, norm: Tensor) -> None:
            local = torch.zeros((), dtype=torch.float64)
            for shard in self.shards:
                for segment in shard.segments:
                    assert segment.parameter.grad is not None
                    local += segment.parameter.grad.double().square().sum()
            update(self, lr, local.sqrt())

        with mock.patch.object(Optimizer, "update", wrong):
            yield

    return patches()


def norms_and_biases_decay() -> Patch:
    regions = buffers.Bucket.regions

    def wrong(self: Any) -> Iterator[buffers.Region]:
        return (region._replace(decay=True) for region in regions(self))

    return mock.patch.object(buffers.Bucket, "regions", wrong)


def updated_weights_not_gathered() -> Patch:
    return mock.patch.object(zero, "all_gather_in_place")


def positions_start_at_zero_on_every_sequence_shard() -> Patch:
    return mock.patch.object(PositionEmbedding, "rows", lambda self, length: (0, length))


def column_input_gradient_not_reduced() -> Patch:
    """The all-reduces of the linear layers' backward are left out, those of forward are not."""

    def wrong(tensor: Tensor, axis: Axis, *args: Any) -> Tensor:
        from megapipe.tensor_parallel.collectives import all_reduce

        in_backward = torch._C._current_graph_task_id() != -1
        return tensor if in_backward else all_reduce(tensor, axis, *args)

    return mock.patch.object(linear, "all_reduce", wrong)


def small_error_in_a_reduction() -> Patch:
    """1e-6 on top of each sum: far below what a loss curve shows."""
    reduce = linear.all_reduce

    def wrong(tensor: Tensor, axis: Axis, *args: Any) -> Tensor:
        return reduce(tensor, axis, *args).add_(1e-6)

    return mock.patch.object(linear, "all_reduce", wrong)


def last_layer_lost() -> Patch:
    """A stage runs all its layers but the last one."""
    hidden = gpt.GPTStage.hidden

    def wrong(self: gpt.GPTStage, x: Any, mb: Any) -> Tensor:
        layers = self.layers
        self.layers = torch.nn.ModuleList(list(layers)[:-1])
        try:
            return hidden(self, x, mb)
        finally:
            self.layers = layers

    return mock.patch.object(gpt.GPTStage, "hidden", wrong)


OUTRIGHT = {"padded_logits_in_the_softmax": "embedding.word.weight: the padding is not zero"}
"""Faults that fail before anything is compared, and how."""
FAULTS: dict[Callable[[], Patch], Case] = {
    tied_uses_not_added: Case(),
    tied_gradient_not_reduced_over_its_holders: PIPELINE,
    replicated_parameters_counted_on_every_tp_rank: TENSOR,
    one_weight_gradient_dropped: PIPELINE,
    weight_gradients_overwritten_instead_of_added: Case(),
    microbatches_swapped_between_stages: PIPELINE,
    wrong_denominator: Case(m=4, masked=0.5),
    token_count_of_one_replica_only: DATA,
    stale_receive_buffer: PIPELINE,
    sequence_partial_gradients_not_summed: SEQUENCE,
    padded_logits_in_the_softmax: Case(),
    gradients_not_zeroed: Case(),
    gradients_not_reduced_over_replicas: DATA,
    clipped_by_the_local_norm: DATA,
    norms_and_biases_decay: Case(),
    updated_weights_not_gathered: DATA,
    positions_start_at_zero_on_every_sequence_shard: SEQUENCE,
    column_input_gradient_not_reduced: TENSOR,
    small_error_in_a_reduction: TENSOR,
    last_layer_lost: PIPELINE,
}


def run_with(world: World, fault: Callable[[], Patch], case: Case) -> Outcome | str:
    """The case with one fault; the message where the fault makes it fail outright."""
    with fault():
        try:
            return run_case(world, case)
        except AssertionError as error:
            return str(error)


def run_faults(world: World) -> list[tuple[str, Outcome | str]]:
    """Every fault whose case has this world's size."""
    mine = {fault: case for fault, case in FAULTS.items() if case.world == world.size}
    return [(fault.__name__, run_with(world, fault, case)) for fault, case in mine.items()]
