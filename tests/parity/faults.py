"""Bugs that frameworks of this field have had, seeded one at a time: parity has to notice each.

Every fault is a patch of one place in the package, applied inside the ranks of a test world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.bias import causal_upper_left

from megapipe.context.positions import Positions
from megapipe.distributed.collectives import Wait, done
from megapipe.engine import channels
from megapipe.engine.executor import Executor
from megapipe.engine.stage import Key, Stage
from megapipe.layers import kv_cache, linear, lora
from megapipe.layers.linear import ColumnParallelLinear, replicated_linear
from megapipe.layers.lora_specs import RowSlice
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.layers.specs import ParameterSpec
from megapipe.layout import buckets
from megapipe.model.gpt.block import Blocks
from megapipe.model.gpt.stage import GPTStage
from megapipe.ops import attention
from megapipe.optim import buffers
from megapipe.optim import shard as shards
from megapipe.optim.bucket_launch import BucketLauncher
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rules.rule import Range, Rule, StateSlice
from megapipe.optim.shard import Shard
from megapipe.schedule.ir import Schedule
from megapipe.testing import World, run_world
from megapipe.train.feed import Feed, LocalTokens
from megapipe.train.step.local_stats import StepTotals
from tests.parity.ranks import Case, Outcome, run_case

Patch = AbstractContextManager[Any]
TENSOR = Case(tp=2, m=3)
PIPELINE = Case(pp=2, m=3)
DATA = Case(dp=2, m=2)
SEQUENCE = replace(TENSOR, sequence_parallel=True)
REPLICATED = replace(PIPELINE, schedule="chimera", tied=False)
SLICED = replace(PIPELINE, schedule="seq1f1b", slices=2)
ADAPTED = replace(TENSOR, lora="all", model="llama")
Fetched = dict[Key, MicroBatch]


def scaled(module: Any, name: str, factor: float) -> Patch:
    """Patch a function so that its result is `factor` times what it should be."""
    function: Callable[..., Tensor] = getattr(module, name)
    return mock.patch.object(module, name, lambda *args: function(*args) * factor)


def tied_uses_not_added() -> Patch:
    return mock.patch.object(buffers.Bucket, "sum_tied_grads")


def tied_gradient_not_reduced_over_its_holders() -> Patch:
    """Reduce on each holder over dp only, without the other stage's use."""
    groups = buckets._groups

    def wrong(config: Any, layout: Any, rank: int, *_: Any, **kind: bool) -> Any:
        return groups(config, layout, rank, [rank], **kind)

    return mock.patch.object(buckets, "_groups", wrong)


def replicated_parameters_counted_on_every_tp_rank() -> Patch:
    square = Shard.own_square

    def wrong(self: Shard) -> Tensor:
        every = [segment._replace(is_primary=True) for segment in self.segments]
        with mock.patch.object(self, "segments", every):
            return square(self)

    return mock.patch.object(Shard, "own_square", wrong)


def one_weight_gradient_dropped() -> Patch:
    backward = Stage.backward

    def wrong(self: Stage, key: Key, grad: Tensor | None) -> Tensor | None:
        return self.input_grad(key, grad) if key == (1, 0) else backward(self, key, grad)

    return mock.patch.object(Stage, "backward", wrong)


def weight_gradients_overwritten_instead_of_added() -> Patch:
    add = linear.add_product

    def wrong(parameter: Any, *product: Any) -> None:
        parameter.main_grad.zero_()
        add(parameter, *product)

    return mock.patch.object(linear, "add_product", wrong)


def microbatches_swapped_between_stages() -> Patch:
    """Give the last stage the labels of another micro-batch than its input's."""
    forward = Stage.forward
    begin = Executor.begin

    def remember(self: Executor, microbatches: Any) -> None:
        for stage in self.stages.values():
            stage.all = microbatches  # type: ignore[attr-defined]
        begin(self, microbatches)

    def wrong(self: Stage, key: Key, x: Any, mb: Any) -> Any:
        if self.is_last:
            every = self.all  # type: ignore[attr-defined]
            mb = replace(mb, labels=every[(key[0] - 1) % len(every), 0].labels)
        return forward(self, key, x, mb)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Executor, "begin", remember))
    stack.enter_context(mock.patch.object(Stage, "forward", wrong))
    return stack


def _fetched(change: Callable[[Feed, Fetched], Fetched]) -> Patch:
    """Change every step's micro-batches after they are fetched."""
    fetch = Feed.fetch

    def wrong(self: Feed, *args: Any) -> tuple[Fetched, int]:
        microbatches, count = fetch(self, *args)
        return change(self, microbatches), count

    return mock.patch.object(Feed, "fetch", wrong)


def wrong_denominator() -> Patch:
    """Divide each micro-batch's loss by its own tokens, as if all had equally many."""

    def change(feed: Feed, microbatches: Fetched) -> Fetched:
        share = len(microbatches) * feed.layout.dp
        return {
            key: replace(mb, scale=1.0 / (share * max(1, int(mb.mask.sum()))))
            for key, mb in microbatches.items()
            if mb.mask is not None
        } or microbatches

    return _fetched(change)


def token_count_of_one_replica_only() -> Patch:
    """Divide by the replica's own token count: the gradient grows with dp."""

    def change(feed: Feed, microbatches: Fetched) -> Fetched:
        return {
            key: replace(mb, scale=mb.scale * feed.layout.dp) for key, mb in microbatches.items()
        }

    return _fetched(change)


def halves_of_a_micro_batch_swapped() -> Patch:
    """Let the first stage, but not the last, swap the halves of micro-batches."""
    fetch = Feed.fetch

    def wrong(self: Feed, schedule: Schedule, *args: Any) -> tuple[Fetched, int]:
        microbatches, count = fetch(self, schedule, *args)
        if schedule.sizes:
            microbatches = {
                (m, part): replace(mb, tokens=microbatches[m ^ 1, part].tokens)
                for (m, part), mb in microbatches.items()
            }
        return microbatches, count

    return mock.patch.object(Feed, "fetch", wrong)


def stale_receive_buffer() -> Patch:
    """Return, from the second message on, the buffer of the receive before."""
    receive = channels._Incoming.receive

    def wrong(self: Any) -> Tensor:
        tensor = receive(self)
        last = getattr(self, "last", tensor)
        self.last = tensor
        return last

    return mock.patch.object(channels._Incoming, "receive", wrong)


def sequence_partial_gradients_not_summed() -> Patch:
    return mock.patch.object(Shard, "_sum_parts")


def padded_logits_in_the_softmax() -> Patch:
    right = GPTStage._loss

    def wrong(self: GPTStage, hidden: Tensor, head: Any, mb: MicroBatch) -> Tensor:
        padded = head.weight.shape[0] * self.sharding.tp.size
        config = self.config.model_copy(update={"vocab_size": padded})
        with mock.patch.object(self, "config", config):
            return right(self, hidden, head, mb)

    return mock.patch.object(GPTStage, "_loss", wrong)


def gradients_not_zeroed() -> Patch:
    return mock.patch.object(Optimizer, "zero_grad")


def gradients_not_reduced_over_replicas() -> Patch:
    def wrong(self: Shard) -> None:
        self.grad = self.bucket.grads[0][self.start : self.stop]

    return mock.patch.object(Shard, "finish_reduce", wrong)


def recomputed_with_other_random_numbers() -> Patch:
    def wrong(self: Stage, key: Key) -> None:
        x, mb = self._inputs.pop(key)
        self._build(key, x, replace(mb, seed=mb.seed + 1))

    return mock.patch.object(Stage, "recompute", wrong)


def replicated_gradients_not_reduced_between_holders() -> Patch:
    """Let each holder of a stage update its shard with its own gradients only."""
    return gradients_not_reduced_over_replicas()


def replicated_stage_has_a_bucket_of_each_holder_s_own() -> Patch:
    """Reduce on all holders over dp only, as if one rank held the stage."""
    return tied_gradient_not_reduced_over_its_holders()


def loss_of_one_holder_of_the_last_stage_only() -> Patch:
    own_loss = StepTotals.own_loss

    def wrong(self: StepTotals, tokens: LocalTokens) -> tuple[Tensor, LocalTokens]:
        machine = self._machine
        if machine.last is not None and machine.mesh.pp.index > 0:
            machine.last.loss_sums.clear()
        return own_loss(self, tokens)

    return mock.patch.object(StepTotals, "own_loss", wrong)


def clipped_by_the_local_norm() -> Patch:
    """Clip on each rank by the norm of what it owns."""

    @contextmanager
    def patches() -> Iterator[None]:
        update = Optimizer.update

        def wrong(self: Optimizer, lr: float, factor: float) -> None:
            local = sum(shard.grad.double().square().sum().item() for shard in self.shards)
            assert self.config.max_grad_norm is not None
            update(self, lr, min(1.0, self.config.max_grad_norm / local**0.5))

        with mock.patch.object(Optimizer, "update", wrong):
            yield

    return patches()


def norms_and_biases_decay() -> Patch:
    parts = Rule.parts

    def wrong(self: Rule, shard: Shard, ranges: Iterable[Range]) -> Iterator[StateSlice]:
        return parts(self, shard, [each._replace(decay=True) for each in ranges])

    return mock.patch.object(Rule, "parts", wrong)


def gradients_leave_before_those_that_are_put_off() -> Patch:
    """Start a bucket's reduction while a weight gradient in it is still deferred."""
    came = BucketLauncher.gradient_ready
    return mock.patch.object(
        BucketLauncher, "gradient_ready", lambda self, parameter, _: came(self, parameter, ())
    )


def gradients_leave_a_piece_too_early() -> Patch:
    """Start each reduction when the first of its gradients has arrived."""

    def wrong(self: BucketLauncher, parameter: Parameter, waiting: Iterable[Parameter]) -> None:
        self._send(self._bucket_of.get(spec_of(parameter).name, 0) + 1)

    return mock.patch.object(BucketLauncher, "gradient_ready", wrong)


def updated_weights_not_gathered() -> Patch:
    return mock.patch.object(shards, "start_all_gather", return_value=lambda: None)


def positions_start_at_zero_on_every_sequence_shard() -> Patch:
    return mock.patch.object(
        Positions, "part", lambda self, _, parts: self.rows(0, self.count // parts)
    )


def positions_start_at_zero_in_every_slice() -> Patch:
    return mock.patch.object(MicroBatch, "positions_of", lambda _, rows: Positions.whole(rows))


def a_slice_attends_as_if_it_were_the_first() -> Patch:
    """Put the causal mask into the upper left corner of the scores."""
    return mock.patch.object(attention, "lower_right", lambda s, t, _: causal_upper_left(s, t))


def key_and_value_gradients_of_later_slices_dropped() -> Patch:
    return mock.patch.object(kv_cache._Rows, "collect", lambda self, start, grad: grad[start:])


def recomputed_from_a_stale_input() -> Patch:
    """Use, from the second recomputation on, the input of the one before."""

    def wrong(self: Stage, key: Key) -> None:
        inputs = self._inputs.pop(key)
        stale = getattr(self, "stale", inputs)
        self.stale = inputs  # type: ignore[attr-defined]
        self._build(key, *stale)

    return mock.patch.object(Stage, "recompute", wrong)


def column_input_gradient_not_reduced() -> Patch:
    """Leave out the all-reduces of the linear layers' backward, but not of the forward."""
    return mock.patch.object(linear, "start_sum", lambda partial, sharding: (partial, done))


def small_error_in_a_reduction() -> Patch:
    """Add 1e-6 to each sum: far below what a loss curve shows."""
    start_sum = linear.start_sum

    def wrong(partial: Tensor, sharding: Sharding) -> tuple[Tensor, Wait]:
        total, summed = start_sum(partial, sharding)
        summed()
        return total.add_(1e-6), done

    return mock.patch.object(linear, "start_sum", wrong)


def last_layer_lost() -> Patch:
    """Run all layers of a stage except the last one."""
    hidden = GPTStage.hidden

    def wrong(self: GPTStage, *args: Any, **options: Any) -> Tensor:
        layers = self.layers
        self.layers = Blocks(list(layers)[:-1])
        try:
            return hidden(self, *args, **options)
        finally:
            self.layers = layers

    return mock.patch.object(GPTStage, "hidden", wrong)


def replicated_adapter_gradients_summed_over_tp() -> Patch:
    """Count a matrix tp times that every tp rank holds whole, with its whole gradient."""

    def wrong(sharding: Sharding, spec: ParameterSpec) -> ColumnParallelLinear:
        return replicated_linear(sharding, replace(spec, heads_partial=True))

    return mock.patch.object(lora, "replicated_linear", wrong)


def replicated_adapter_gradients_of_one_sequence_shard() -> Patch:
    """Take the gradient from one tp rank's positions for the whole gradient."""

    def wrong(sharding: Sharding, spec: ParameterSpec) -> ColumnParallelLinear:
        return replicated_linear(sharding, replace(spec, sequence_partial=False))

    return mock.patch.object(lora, "replicated_linear", wrong)


def adapters_of_one_tp_rank_left_out_of_the_norm() -> Patch:
    square = Shard.own_square

    def wrong(self: Shard) -> Tensor:
        return square(self) * (self.tp.index == 0)

    return mock.patch.object(Shard, "own_square", wrong)


def adapters_not_scaled() -> Patch:
    def wrong(self: lora.Adapter, x: Tensor, skip_output: bool = False) -> Tensor:
        y: Tensor = self.b(self.a(x), skip_output)
        return y

    return mock.patch.object(lora.Adapter, "forward", wrong)


def adapter_of_keys_added_to_values() -> Patch:
    part = lora._part

    def wrong(y: Tensor, rows: RowSlice) -> Tensor:
        is_of_keys = rows.start == 1 and rows.shape[1] == 3
        return part(y, rows._replace(start=2, stop=3) if is_of_keys else rows)

    return mock.patch.object(lora, "_part", wrong)


def frozen_weights_are_trained() -> Patch:
    """Decay frozen weights like the others."""

    def wrong(self: Optimizer, lr: float, factor: float = 1.0) -> None:
        update(self, lr, factor)
        for shard in self.frozen:
            shard.bucket.weights.mul_(1 - 0.1 * lr)

    update = Optimizer.update
    return mock.patch.object(Optimizer, "update", wrong)


OUTRIGHT = {"padded_logits_in_the_softmax": "embedding.word.weight: the padding is not zero"}
"""Faults that fail before anything is compared, and their errors."""
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
    gradients_leave_before_those_that_are_put_off: replace(SEQUENCE, dp=2, reduce_chunk_mib=1e-6),
    gradients_leave_a_piece_too_early: replace(DATA, reduce_chunk_mib=0.03),
    updated_weights_not_gathered: DATA,
    positions_start_at_zero_on_every_sequence_shard: SEQUENCE,
    column_input_gradient_not_reduced: TENSOR,
    small_error_in_a_reduction: TENSOR,
    last_layer_lost: PIPELINE,
    replicated_gradients_not_reduced_between_holders: REPLICATED,
    replicated_stage_has_a_bucket_of_each_holder_s_own: REPLICATED,
    loss_of_one_holder_of_the_last_stage_only: REPLICATED,
    positions_start_at_zero_in_every_slice: SLICED,
    a_slice_attends_as_if_it_were_the_first: SLICED,
    key_and_value_gradients_of_later_slices_dropped: SLICED,
    recomputed_from_a_stale_input: replace(PIPELINE, schedule="varuna"),
    replicated_adapter_gradients_summed_over_tp: ADAPTED,
    replicated_adapter_gradients_of_one_sequence_shard: replace(ADAPTED, sequence_parallel=True),
    adapters_of_one_tp_rank_left_out_of_the_norm: ADAPTED,
    adapters_not_scaled: ADAPTED,
    adapter_of_keys_added_to_values: ADAPTED,
    frozen_weights_are_trained: ADAPTED,
    halves_of_a_micro_batch_swapped: replace(PIPELINE, schedule="chimera_backward_halving"),
}


def run_with(world: World, fault: Callable[[], Patch], case: Case) -> Outcome | str:
    """Run the case with one fault. Return the message if the fault makes it fail outright."""
    with fault():
        try:
            return run_case(world, case)
        except AssertionError as error:
            return str(error)


def run_with_dropout(world: World) -> list[list[Outcome]]:
    """Run three cases that differ only in recomputation: without it, with it, and with other random
    numbers."""
    plain = Case(pp=2, m=3, dropout=0.2, masked=0.3, in_process=True, tied=False)
    recomputing = replace(plain, schedule="varuna")
    with recomputed_with_other_random_numbers():
        wrong = run_case(world, recomputing)
    return [[run_case(world, plain)], [run_case(world, recomputing)], [wrong]]


def run_with_each(world: World, faults: Mapping[Callable[[], Patch], Case]) -> list[Outcome | str]:
    return [run_with(world, fault, case) for fault, case in faults.items()]


def outcomes_of_faults(
    faults: Mapping[Callable[[], Patch], Case], run: Callable[..., list[Any]] = run_with_each
) -> dict[str, list[Any]]:
    """Return, for each fault, every rank's outcome: what `run` returns for it."""
    found: dict[str, list[Any]] = {}
    for size in sorted({case.world for case in faults.values()}):
        mine = {fault: case for fault, case in faults.items() if case.world == size}
        for rank in run_world(size, run, mine):
            for fault, outcome in zip(mine, rank, strict=True):
                found.setdefault(fault.__name__, []).append(outcome)
    return found
