"""Mistakes in no-flush training, each of which a comparison has to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.async_runner import AsyncRunner
from megapipe.layers.weight_grad import main_grad
from megapipe.optim import optimizer
from megapipe.optim import shard as shard_of_a_bucket
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rules.rule import Rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import MASTER, VELOCITY
from megapipe.optim.tied_embedding import TiedEmbeddingLink
from megapipe.optim.velocity import predict_older_weights
from megapipe.optim.weight_prediction import predict
from megapipe.optim.weight_versions import WeightVersions
from megapipe.schedule.async_schedules import policies
from megapipe.schedule.async_schedules.async_schedule import (
    AsyncSchedule,
    mean_staleness,
    moved_back,
)
from megapipe.schedule.async_schedules.policies import Lists, VersionPolicy
from megapipe.schedule.ir import Op, Read
from megapipe.train.async_training import async_training
from megapipe.train.async_training.async_training import AsyncTraining
from megapipe.train.feed import BatchReader
from megapipe.train.step import make_optimizer
from megapipe.train.update import StepResult, Update

Patch = AbstractContextManager[Any]
_use = WeightVersions.use


def a_version_too_old() -> Patch:
    """Use the next older version, if one exists."""

    def wrong(self: WeightVersions, version: int, *ahead: Fraction) -> None:
        _use(self, max(version - 1, self.newest + 1 - len(self.weights)), *ahead)

    return mock.patch.object(WeightVersions, "use", wrong)


def forwards_read_the_newest() -> Patch:
    return mock.patch.object(
        WeightVersions, "use", lambda self, version, *ahead: _use(self, self.newest, *ahead)
    )


def _policy(name: str, reads: Callable[[Lists, Op], Read], **more: Any) -> Patch:
    return mock.patch.dict(policies.POLICIES, {name: VersionPolicy(name, reads, **more)})


def backwards_read_the_newest() -> Patch:
    return _policy("stash", policies.latest, follows=False)


def stages_read_what_is_newest_to_themselves() -> Patch:
    return _policy("vertical", policies.stash, agrees=True)


def a_buffer_is_written_while_it_has_readers() -> Patch:
    def wrong(self: WeightVersions, version: int, *ahead: Fraction) -> None:
        _use(self, max(version, self.newest + 1 - len(self.weights)), *ahead)

    kept = async_training.versions_kept

    def fewer(stream: AsyncSchedule) -> dict[int, int]:
        return {stage: max(1, count - 1) for stage, count in kept(stream).items()}

    @contextmanager
    def patches() -> Iterator[None]:
        with (
            mock.patch.object(async_training, "versions_kept", fewer),
            mock.patch.object(WeightVersions, "use", wrong),
        ):
            yield

    return patches()


def parameters_stay_where_the_forward_pointed_them() -> Patch:
    """Ignore the version that a backward needs."""
    last: dict[int, int] = {}

    def wrong(self: WeightVersions, version: int, *ahead: Fraction) -> None:
        if last.get(id(self), -1) <= version:
            _use(self, version, *ahead)
        last[id(self)] = version

    return mock.patch.object(WeightVersions, "use", wrong)


def gradients_go_into_the_next_window() -> Patch:
    return mock.patch.object(WeightVersions, "switch_accumulator")


def gradients_of_norms_go_into_the_window_before() -> Patch:
    """Let autograd keep the accumulators that it got when the stage was built."""
    turn = WeightVersions.switch_accumulator

    def wrong(self: WeightVersions) -> None:
        norms = [each for each in self.shard.bucket.placed if each.entry.spec.grad_by_autograd]
        before = [main_grad(each.parameter) for each in norms]
        turn(self)
        for each, grad in zip(norms, before, strict=True):
            each.parameter.main_grad = grad  # type: ignore[attr-defined]

    return mock.patch.object(WeightVersions, "switch_accumulator", wrong)


def gradients_are_not_forgotten() -> Patch:
    update = Optimizer.update_stage

    def wrong(self: Optimizer, stage: int, *given: Any) -> None:
        update(self, stage, *given)
        for shard in self.shards_of(stage):
            shard.zero_grad = lambda: None  # type: ignore[method-assign]

    return mock.patch.object(Optimizer, "update_stage", wrong)


def an_update_is_made_twice() -> Patch:
    step = Optimizer._step

    def wrong(self: Optimizer, shards: Any, lr: float, factor: float, count: int) -> None:
        step(self, shards, lr, factor, count)
        if count == 4:
            step(self, shards, lr, 1.0, count)

    return mock.patch.object(Optimizer, "_step", wrong)


def an_update_is_lost() -> Patch:
    step = Optimizer._step

    def wrong(self: Optimizer, shards: Any, lr: float, factor: float, count: int) -> None:
        step(self, shards, 0.0 if count == 4 else lr, factor, count)

    return mock.patch.object(Optimizer, "_step", wrong)


def an_update_is_late() -> Patch:
    """Make each update together with the next one."""
    step = Optimizer._step
    late: dict[tuple[int, int], tuple[list[Tensor], float, float]] = {}

    def wrong(self: Optimizer, shards: Any, lr: float, factor: float, count: int) -> None:
        key = id(self), shards[0].bucket.index
        grads = [shard.grad.clone() for shard in shards]
        if count == 4:
            late[key] = grads, lr, factor
            for shard in shards:
                predict(self.rule, shard, 0.0, 0, shard.weights)
            return
        if count == 5:
            before, *given = late[key]
            for shard, grad in zip(shards, before, strict=True):
                shard.grad.copy_(grad)
            step(self, shards, *given, 4)
            for shard, grad in zip(shards, grads, strict=True):
                shard.grad.copy_(grad)
        step(self, shards, lr, factor, count)

    return mock.patch.object(Optimizer, "_step", wrong)


def bias_is_corrected_by_another_count() -> Patch:
    step = Optimizer._step

    def wrong(self: Optimizer, shards: Any, lr: float, factor: float, count: int) -> None:
        step(self, shards, lr, factor, count + 1)

    return mock.patch.object(Optimizer, "_step", wrong)


def the_learning_rate_is_of_another_window() -> Patch:
    lr = Update.lr
    return mock.patch.object(Update, "lr", lambda self, step: lr(self, step + 1))


def clipped_by_the_norm_of_the_stage() -> Patch:
    def wrong(self: AsyncTraining, stage: int, window: int) -> float:
        return float(self._totals_of(window).squared_norms[stage]) ** 0.5

    return mock.patch.object(AsyncTraining, "_norm_of_window", wrong)


def clipped_by_the_norm_of_the_window_before() -> Patch:
    norm = AsyncTraining._norm_of_window

    def wrong(self: AsyncTraining, stage: int, window: int) -> float:
        return norm(self, stage, max(window - 1, self._first or 0))

    return mock.patch.object(AsyncTraining, "_norm_of_window", wrong)


def a_loss_is_given_to_another_step() -> Patch:
    result = Update.result

    def wrong(self: Update, step: int, totals: Any) -> StepResult:
        found = result(self, step, totals)
        self.before, before = found.loss, getattr(self, "before", found.loss)  # type: ignore[attr-defined]
        return StepResult(step, before, found.grad_norm, found.lr, found.tokens)

    return mock.patch.object(Update, "result", wrong)


def weights_are_their_own_masters_after_all() -> Patch:
    """Use fp64 weights as masters; an update then changes the oldest version."""
    return mock.patch.object(make_optimizer, "replace", lambda states, **changes: states)


def what_is_in_flight_keeps_its_numbers() -> Patch:
    return mock.patch.object(AsyncRunner, "cut")


def the_copy_of_a_tied_weight_stays_behind() -> Patch:
    """Let the last stage ignore the tied weights that it receives."""
    receive = TiedEmbeddingLink.receive_weights

    def wrong(self: TiedEmbeddingLink, whole: Tensor) -> Any:
        return receive(self, whole.clone())

    return mock.patch.object(TiedEmbeddingLink, "receive_weights", wrong)


def a_tied_weight_drifts_on_its_own() -> Patch:
    """Let the first stage ignore the tied gradients of the last one."""
    add = TiedEmbeddingLink.add_gradients
    return mock.patch.object(
        TiedEmbeddingLink, "add_gradients", lambda self, own: add(self, own.clone())
    )


def the_tied_sum_is_of_two_windows() -> Patch:
    """Add the last stage's tied gradients a window late."""
    add = TiedEmbeddingLink.add_gradients
    late: dict[int, Tensor] = {}

    def wrong(self: TiedEmbeddingLink, own: Tensor) -> None:
        now = torch.zeros_like(own)
        add(self, now)
        own += late.get(id(self), torch.zeros_like(own))
        late[id(self)] = now

    return mock.patch.object(TiedEmbeddingLink, "add_gradients", wrong)


def both_ends_count_a_tied_weight_in_the_norm() -> Patch:
    finish = Optimizer.finish_stage

    def wrong(self: Optimizer, stage: int) -> Tensor:
        return finish(self, stage) * (2 if stage == self.stages else 1)

    return mock.patch.object(Optimizer, "finish_stage", wrong)


def the_copy_is_taken_while_it_is_read() -> Patch:
    """Receive new weights into the version that forwards of the window still read; it is undefined
    until they have arrived."""
    receive = TiedEmbeddingLink.receive_weights
    before: dict[int, Tensor] = {}

    def wrong(self: TiedEmbeddingLink, whole: Tensor) -> Any:
        old, before[id(self)] = before.get(id(self), whole), whole
        wait = receive(self, old.zero_())

        def taken() -> None:
            wait()
            whole.copy_(old)

        return taken

    return mock.patch.object(TiedEmbeddingLink, "receive_weights", wrong)


def the_velocity_decays_as_that_of_another_stage() -> Patch:
    return mock.patch.object(
        make_optimizer, "moved_back", lambda stream: _of_the_stage_before(moved_back(stream))
    )


def no_velocity_is_averaged() -> Patch:
    return mock.patch.object(make_optimizer, "decay", return_value=0.0)


def moved_back_by_the_velocity_of_the_window_before() -> Patch:
    before: dict[int, Tensor] = {}

    def wrong(shard: Shard, updates: float, out: Tensor) -> None:
        velocity = shard.store.read(VELOCITY, 0, shard.stop - shard.start)
        now = velocity.clone()
        velocity.copy_(before.get(id(shard), now))
        predict_older_weights(shard, updates, out)
        velocity.copy_(now)
        before[id(shard)] = now

    return mock.patch.object(async_training, "predict_older_weights", wrong)


def moved_back_by_the_staleness_of_another_stage() -> Patch:
    def wrong(shard: Shard, updates: float, out: Tensor) -> None:
        predict_older_weights(shard, updates + 1, out)

    return mock.patch.object(async_training, "predict_older_weights", wrong)


def moved_ahead() -> Patch:
    return mock.patch.object(
        async_training,
        "predict_older_weights",
        lambda shard, updates, out: predict_older_weights(shard, -updates, out),
    )


def predicted_as_for_the_window_before() -> Patch:
    before: dict[int, Tensor] = {}

    def wrong(rule: Rule, shard: Shard, distance: float, count: int, out: Tensor) -> None:
        predict(rule, shard, distance, count, out)
        now = out.clone()
        out.copy_(before.get(id(shard), now))
        before[id(shard)] = now

    return mock.patch.object(async_training, "predict", wrong)


def masters_look_ahead() -> Patch:
    def wrong(rule: Rule, shard: Shard, distance: float, count: int, out: Tensor) -> None:
        predict(rule, shard, distance, count, out)
        shard.store.read(MASTER, 0, shard.stop - shard.start).copy_(out)

    return mock.patch.object(optimizer, "predict", wrong)


def validation_looks_ahead() -> Patch:
    return mock.patch.object(Optimizer, "use_master_weights", return_value=nullcontext())


def filled_with_the_newest_versions() -> Patch:
    """Resume without the older versions in the checkpoint, which forwards in flight have read."""
    begin = WeightVersions.begin
    return mock.patch.object(
        WeightVersions, "begin", lambda self, version, older=0: begin(self, version)
    )


def annealed_by_the_staleness_of_another_stage() -> Patch:
    return mock.patch.object(
        async_training,
        "mean_staleness",
        lambda stream: _of_the_stage_before(mean_staleness(stream)),
    )


def _of_the_stage_before(staleness: dict[int, Fraction]) -> dict[int, Fraction]:
    return {stage: staleness[max(stage - 1, 0)] for stage in staleness}


def annealed_from_the_first_step_on() -> Patch:
    lr = AsyncTraining._lr

    def wrong(self: AsyncTraining, stage: int, window: int) -> float:
        return lr(self, stage, window + self._synchronous)

    return mock.patch.object(AsyncTraining, "_lr", wrong)


def filled_before_synchronous_steps_are_over() -> Patch:
    begin = AsyncTraining._begin

    def wrong(self: AsyncTraining, step: int, rows: BatchReader) -> None:
        self._synchronous -= step == self._synchronous - 1
        begin(self, step, rows)

    return mock.patch.object(AsyncTraining, "_begin", wrong)


def moved_back_in_synchronous_steps() -> Patch:
    use = AsyncTraining.point_at

    def wrong(self: AsyncTraining, stage: int, read: Read) -> None:
        synchronous = self._synchronous
        self._synchronous = 0 if read.ahead else synchronous
        use(self, stage, read)
        self._synchronous = synchronous

    return mock.patch.object(AsyncTraining, "point_at", wrong)


def a_rank_of_a_stage_updates_alone() -> Patch:
    """Update with the local gradients, without those of the stage's other ranks."""
    finish = Shard.finish_reduce

    def wrong(self: Shard) -> None:
        own = self.bucket.grads[0][self.start : self.stop].clone()
        finish(self)
        self.grad = own

    return mock.patch.object(Shard, "finish_reduce", wrong)


def ranks_of_a_stage_drift_apart() -> Patch:
    """Drop the shards that other ranks gather."""
    gather = shard_of_a_bucket.start_all_gather

    def wrong(whole: Tensor, *given: Any) -> Any:
        return gather(whole.clone(), *given)

    return mock.patch.object(shard_of_a_bucket, "start_all_gather", wrong)


def clipped_by_what_a_rank_has_of_the_norm() -> Patch:
    total = ParallelMesh.ordered_sum

    def wrong(self: ParallelMesh, vector: Tensor, *axes: Any, **more: Any) -> Tensor:
        return total(self, vector, *(axis for axis in axes if isinstance(axis, str)), **more)

    return mock.patch.object(ParallelMesh, "ordered_sum", wrong)


def a_stage_is_updated_when_its_first_rank_is_through() -> Patch:
    return mock.patch.object(AsyncTraining, "ready", return_value=True)


STASH = (
    *(a_version_too_old, forwards_read_the_newest, backwards_read_the_newest),
    *(a_buffer_is_written_while_it_has_readers, parameters_stay_where_the_forward_pointed_them),
    *(gradients_are_not_forgotten, an_update_is_made_twice, an_update_is_late, an_update_is_lost),
    *(bias_is_corrected_by_another_count, the_learning_rate_is_of_another_window),
    *(a_loss_is_given_to_another_step, weights_are_their_own_masters_after_all),
    what_is_in_flight_keeps_its_numbers,
)
"""Faults that are noticed under stash."""
TIED = (
    *(the_copy_of_a_tied_weight_stays_behind, a_tied_weight_drifts_on_its_own),
    *(the_tied_sum_is_of_two_windows, both_ends_count_a_tied_weight_in_the_norm),
    the_copy_is_taken_while_it_is_read,
)
"""Faults that are noticed under double_buffer with tied embeddings, in two processes."""
CORRECT = (
    *(the_velocity_decays_as_that_of_another_stage, no_velocity_is_averaged),
    *(moved_back_by_the_velocity_of_the_window_before, moved_ahead),
    *(moved_back_by_the_staleness_of_another_stage, annealed_by_the_staleness_of_another_stage),
)
SYNCHRONOUS_AT_FIRST = (
    *(annealed_from_the_first_step_on, filled_before_synchronous_steps_are_over),
    moved_back_in_synchronous_steps,
)
IN_TURNS = (
    *(a_rank_of_a_stage_updates_alone, ranks_of_a_stage_drift_apart),
    clipped_by_what_a_rank_has_of_the_norm,
)
"""Faults that are noticed if a stage has two ranks, in processes."""
IN_ONE_PROCESS = (a_stage_is_updated_when_its_first_rank_is_through,)
"""Faults that are noticed if one process runs both ranks."""
PREDICT = (predicted_as_for_the_window_before,)
LOOK_AHEAD = (masters_look_ahead, validation_looks_ahead)
"""Faults that are noticed if weights are predicted ahead of their masters, with a validation after
each step."""
VERTICAL = (stages_read_what_is_newest_to_themselves,)
DOUBLE_BUFFER = (
    *(gradients_go_into_the_next_window, clipped_by_the_norm_of_the_stage),
    *(clipped_by_the_norm_of_the_window_before, gradients_of_norms_go_into_the_window_before),
)
LEADS_TO = {
    weights_are_their_own_masters_after_all: "these weights are their own master weights",
    what_is_in_flight_keeps_its_numbers: r"KeyError\(\(0, 0\)\)",
    a_stage_is_updated_when_its_first_rank_is_through: "version 0, the newest is 2",
}
"""Errors of the faults that fail before a comparison."""
