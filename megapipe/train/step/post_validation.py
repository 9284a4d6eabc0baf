"""Optimizer steps that are taken at once, and validated while the next step begins.

Clipping needs the global gradient norm, so every rank would wait at the end of a step until the
slowest one is there: a barrier that undoes what a schedule without bubbles has gained (Qi et al.,
2401.10241, section 4). Here a rank updates its weights as soon as its own gradients are reduced, if
nothing that it has seen itself forbids that, and begins the next step. Meanwhile the norms are
exchanged along the pipeline. Before the first backward all ranks look at the same sum: if it asks
for clipping, or is not finite, they abort what they have begun, take back the update to the last
bit, make the right one, and begin again.
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
from megapipe.train.step.machine import Machine
from megapipe.train.step.own_totals import StepTotals
from megapipe.train.step.stepper import Asked, Executors, Watch
from megapipe.train.totals import LARGEST, StepStats, Wishes
from megapipe.train.update import StepResult, Update

Known = Sequence[tuple[Collection[int], Sequence[float]]]
"""Layers, and what is told of their choices."""


class _Taken(NamedTuple):
    """A step whose update has not been validated."""

    step: int
    totals: Callable[[], Tensor]
    """Waits for the totals of all pipeline ranks."""
    scaler: Mapping[str, JsonValue]
    """The loss scale's state before it."""
    made: int
    """The step of the update before it."""
    executor: Executor
    rows: BatchReader


class Shared(NamedTuple):
    """Layers that pipeline ranks have in common."""

    layers: Collection[int]
    ranks: Axis


def layers_here(mesh: ParallelMesh, layout: Layout) -> list[Shared]:
    """The layers of this rank, by the ranks that have them. All ranks call it."""
    placement, found = layout.schedule.placement, dict[tuple[int, ...], list[int]]()
    for stage, spec in enumerate(layout.stage_layers):
        found.setdefault(placement.holders(stage), []).extend(spec.layers)
    return [
        Shared(layers, mesh.holders_of(ranks) if len(ranks) > 1 else Axis.alone(mesh.rank))
        for ranks, layers in found.items()
        if mesh.at.pp in ranks
    ]


class PostValidation:
    """Takes steps whose updates are validated only after they are made."""

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
        """Updates so far that were undone, or not made before validation."""

    @property
    def open(self) -> bool:
        """Whether a step is still to be validated."""
        return self._taken is not None

    def train(self, step: int, rows: BatchReader, wishes: Asked, watch: Watch) -> list[StepResult]:
        """Take step `step`; returns the result of the one before."""
        executor = self.executors.of(watch)[0]
        tokens = self._begin(executor, step, rows)
        result, held = self._validate(executor.abort)
        if not held:
            tokens = self._begin(executor, step, rows)
        self._complete(executor)
        self._data.upload_ahead(step + 1, rows)
        vector = self._vector(tokens, wishes)
        totals = self._mesh.start_ordered_sum(vector, "pp", largest=LARGEST)
        update = self._update
        self._taken = _Taken(step, totals, update.scaler.state(), update.made, executor, rows)
        self._take(step, self._totals.unpack(vector), self._known(vector))
        return result

    def _begin(self, executor: Executor, step: int, rows: BatchReader) -> LocalTokens:
        """Run the prefix of a step; its tokens."""
        microbatches, tokens = self._data.fetch(step, rows)
        executor.run_prefix(microbatches)
        return tokens

    def _complete(self, executor: Executor) -> None:
        """Run what follows the prefix, once nothing needs the gradients of the step before."""
        self._update.optimizer.zero_grad()
        executor.resume()

    def _vector(self, tokens: LocalTokens, wishes: Asked) -> Tensor:
        """Packed totals of this pipeline rank and its replicas."""
        own = self._totals.own(tokens, wishes).pack()
        return self._mesh.ordered_sum(own, "tp", "cp", "dp", largest=LARGEST)

    def _again(self, taken: _Taken) -> StepStats:
        """Compute a step anew, whose update is undone; the totals of all ranks."""
        tokens = self._begin(taken.executor, taken.step, taken.rows)
        self._complete(taken.executor)
        vector = self._vector(tokens, Wishes)
        whole = self._mesh.ordered_sum(vector, "pp", largest=LARGEST)
        return self._totals.unpack(whole)

    def settle(self) -> list[StepResult]:
        """Validate the last step; returns its result, unless that was done before."""
        return self._validate(lambda: None)[0]

    def drop(self) -> None:
        """Forget the step that is open, of which nothing is to stay."""
        self._taken = None

    def use_schedule(self, schedule: Schedule) -> None:
        assert not self.open
        self.executors.use_schedule(schedule)

    @property
    def samples_read(self) -> list[int]:
        return self._data.samples_read

    def _known(self, vector: Tensor) -> Known:
        """The layers here, and what all who have them tell of their choices, from the packed totals
        of this pipeline rank."""
        return [
            (
                layers,
                self._totals.unpack(self._mesh.ordered_sum(vector, ranks, largest=LARGEST)).routing,
            )
            for layers, ranks in self._layers
        ]

    def _take(self, step: int, totals: StepStats, known: Known) -> None:
        """Update by what this pipeline rank and its replicas know, which is `totals`, and move what
        goes by the choices of layers by what is `known` of those here.

        A partial norm is a lower bound: if it already exceeds the clip, so does the global norm.
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
        """The result of the step that is open, and whether its update held; if not, what has begun
        since is aborted."""
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
        return [update.apply(step, totals, lambda: self._again(taken))], False
