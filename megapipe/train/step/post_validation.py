"""Post-validation: updates that are made at once, and validated while the next step begins.

Clipping needs the global gradient norm. So every rank would wait at the end of a step for the
slowest rank. Such a barrier undoes the gain of a schedule without bubbles (Qi et al., 2401.10241,
section 4). Instead a rank updates its weights as soon as its gradients are reduced, if its totals
allow an update, and begins the next step. Meanwhile the norms are exchanged along the pipeline.
Each rank has the totals of all ranks before its first backward. If they require clipping, or are
not finite, all ranks abort the new step, undo the update bitwise, make the right update, and begin
the new step again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.executor import Executor
from megapipe.layout.layout import Layout
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader, LocalTokens
from megapipe.train.step.data import StepData
from megapipe.train.step.local_stats import StepTotals
from megapipe.train.step.machine import Machine
from megapipe.train.step.stepper import Asked, Executors, Watch
from megapipe.train.step_stats import LARGEST, RankRequests, StepStats
from megapipe.train.update import StepResult, Update

Known = Sequence[tuple[Collection[int], Sequence[float]]]
"""Groups of local layers, each with routing totals that are complete for the group's layers."""


class _Taken(NamedTuple):
    """A step whose update has not been validated."""

    step: int
    totals: Callable[[], Tensor]
    """Function that waits for the totals of all pipeline ranks."""
    scaler: Mapping[str, JsonValue]
    """State of the loss scale before the step."""
    made: int
    """Index, from 0, of the step that made the previous update."""
    executor: Executor
    rows: BatchReader


class Shared(NamedTuple):
    """Layers that the same pipeline ranks hold, and the axis of these ranks."""

    layers: Collection[int]
    ranks: Axis


def layers_here(mesh: ParallelMesh, layout: Layout) -> list[Shared]:
    """Return this rank's layers, grouped by the pipeline ranks that hold them. Collective."""
    placement, found = layout.schedule.placement, dict[tuple[int, ...], list[int]]()
    for stage, spec in enumerate(layout.stage_layers):
        found.setdefault(placement.holders(stage), []).extend(spec.layers)
    return [
        Shared(layers, mesh.holders_of(ranks) if len(ranks) > 1 else Axis.alone(mesh.rank))
        for ranks, layers in found.items()
        if mesh.at.pp in ranks
    ]


class PostValidation:
    """Takes steps whose updates are validated only after the updates are made."""

    def __init__(
        self,
        machine: Machine,
        data: StepData,
        totals: StepTotals,
        update: Update,
        layers: Sequence[Shared],
    ) -> None:
        self._mesh = machine.mesh
        self._data = data
        self._totals = totals
        self._update = update
        self._layers = layers
        self.executors = Executors(machine)
        self._taken: _Taken | None = None
        self.undone = 0
        """Number of steps whose update was undone, or was not made before validation."""

    @property
    def open(self) -> bool:
        """Whether a step is still to be validated."""
        return self._taken is not None

    def train(
        self, step: int, rows: BatchReader, requests: Asked, watch: Watch
    ) -> list[StepResult]:
        """Take step `step`; return the result of the previous step."""
        executor = self.executors.of(watch)[0]
        tokens = self._begin(executor, step, rows)
        result, valid = self._validate(executor.abort)
        if not valid:
            tokens = self._begin(executor, step, rows)
        self._complete(executor)
        self._data.upload_ahead(step + 1, rows)
        vector = self._vector(tokens, requests)
        totals = self._mesh.start_ordered_sum(vector, "pp", largest=LARGEST)
        update = self._update
        self._taken = _Taken(step, totals, update.scaler.state(), update.made, executor, rows)
        self._take(step, self._totals.unpack(vector), self._known(vector))
        return result

    def _begin(self, executor: Executor, step: int, rows: BatchReader) -> LocalTokens:
        """Run a step's prefix: forwards that can be undone. Return the step's token counts."""
        microbatches, tokens = self._data.fetch(step, rows)
        executor.run_prefix(microbatches)
        return tokens

    def _complete(self, executor: Executor) -> None:
        """Run the rest of a step, once the previous step's gradients are no longer needed."""
        self._update.optimizer.zero_grad()
        executor.resume()

    def _vector(self, tokens: LocalTokens, requests: Asked) -> Tensor:
        """Return the packed totals of this pipeline rank and its replicas."""
        own = self._totals.own(tokens, requests).pack()
        return self._mesh.ordered_sum(own, "tp", "cp", "dp", largest=LARGEST)

    def _replay(self, taken: _Taken) -> StepStats:
        """Replay a step whose update is undone; return the totals of all ranks."""
        tokens = self._begin(taken.executor, taken.step, taken.rows)
        self._complete(taken.executor)
        vector = self._vector(tokens, RankRequests)
        whole = self._mesh.ordered_sum(vector, "pp", largest=LARGEST)
        return self._totals.unpack(whole)

    def settle(self) -> list[StepResult]:
        """Validate the last step and return its result; [] if it is validated already."""
        return self._validate(lambda: None)[0]

    def drop(self) -> None:
        """Drop the step that has not been validated."""
        self._taken = None

    def use_schedule(self, schedule: Schedule) -> None:
        assert not self.open
        self.executors.use_schedule(schedule)

    @property
    def samples_read(self) -> list[int]:
        return self._data.samples_read

    def _known(self, vector: Tensor) -> Known:
        """Return the routing totals of local layers, in groups, summed over all ranks that have the
        layers. `vector`: packed totals of this pipeline rank and its replicas."""
        return [
            (
                layers,
                self._totals.unpack(self._mesh.ordered_sum(vector, ranks, largest=LARGEST)).routing,
            )
            for layers, ranks in self._layers
        ]

    def _take(self, step: int, totals: StepStats, known: Known) -> None:
        """Update the weights if the `totals` of this pipeline rank and its replicas allow it. State
        that depends on routing (biases of experts) is updated with the `known` totals of local
        layers.

        A partial norm is a lower bound: if it already exceeds the clip, so does the global norm,
        and the update waits for validation.
        """
        update = self._update
        update.optimizer.snapshot()
        for each in update.followers:
            each.snapshot()
        if update.is_plain(totals):
            update.apply_plainly(step)
            for each in update.followers:
                each.update_speculatively(known)
        else:
            update.optimizer.gather_shared_weights()

    def _validate(self, abort: Callable[[], None]) -> tuple[list[StepResult], bool]:
        """Return the result of the step to be validated, and whether its update held. If it did
        not, call `abort` to abort the step that has begun since."""
        if self._taken is None:
            return [], True
        update = self._update
        taken, self._taken = self._taken, None
        step, totals = taken.step, self._totals.unpack(taken.totals())
        after = update.scaler.state()
        update.scaler.load(taken.scaler)
        doubted = update.fault(totals) is not None or update.rerun.due(step)
        if update.is_plain(totals) and not doubted:
            for each in update.followers:
                each.confirm(totals.routing)
            result = update.result(step, totals)
            update.scaler.load(after)
            update.judge.record(totals)
            return [result], True
        abort()
        self.undone += 1
        update.optimizer.restore()
        for each in update.followers:
            each.restore()
        update.made = taken.made
        return [update.apply(step, totals, lambda: self._replay(taken))], False
