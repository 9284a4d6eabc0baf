"""From the totals of a step to its update: loss scale, clipping, learning rate, result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megapipe.config.config import OptimizerConfig
from megapipe.config.numbers import NumbersConfig
from megapipe.optim.lr import learning_rate
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.scaler import LossScaler
from megapipe.train.followers import Follower
from megapipe.train.judge import Anomaly, AnomalyDetector, BadStep
from megapipe.train.rerun import Again, FaultReplay
from megapipe.train.totals import SourceStats, StepStats, Wishes


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean loss per unmasked token of the global batch, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Unmasked tokens in the global batch."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass (fp16)."""
    wishes: Wishes = field(default_factory=Wishes, compare=False)
    """Requests of all ranks together, at the end of the step."""
    skipped: str | None = None
    """Why the step was made without an update; None: there was one."""
    note: str | None = field(default=None, compare=False)
    """A line for the user on how the step was computed, and on what has changed with it."""
    by_source: tuple[SourceStats, ...] = ()
    """Of a mixture: losses and tokens of each source."""
    routing: tuple[float, ...] = ()
    """Numbers of routing, of :class:`~megapipe.train.totals.StepStats`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of followers (:mod:`megapipe.train.followers`) after the step, by name."""
    memory_gib: float | None = field(default=None, compare=False)
    """Memory of the fullest rank; see :mod:`megapipe.observe.memory`."""
    seconds: float = field(default=math.nan, compare=False)
    """Wall time of the step on this rank; known when the step has ended."""


class Update:
    """Makes the updates of a run of `steps`, whose gradients `optimizer` has reduced, and has
    `followers` follow them.

    `numbers` says what becomes of numbers that cannot be right. `exact`: equal computations give
    equal bits here.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: Optimizer,
        scaler: LossScaler,
        followers: Sequence[Follower],
        steps: int,
        numbers: NumbersConfig,
        *,
        exact: bool,
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.scaler = scaler
        self.followers = [each for each in followers if not each.empty]
        self.steps = steps
        self.judge = AnomalyDetector(numbers)
        self.rerun = FaultReplay(numbers, exact=exact, fault=self._located_fault)
        self.made = 0
        """The step of the last update."""

    def apply(self, step: int, totals: StepStats, again: Again) -> StepResult:
        """Update by gradients with these totals of all ranks, or skip the update.

        Where they cannot be right, `again` is called first, which computes others in their place.

        fp16 skips it where a smaller loss scale may mend the gradients, ``numbers.non_finite`` says
        what comes of others. Raises :class:`~megapipe.train.judge.BadStep`, before the update,
        where that is to stop or to rewind.
        """
        if not math.isfinite(totals.states):
            raise self.states_not_finite()
        totals, fault, note = self.rerun.outcome(step, totals, again)
        result = replace(self.result(step, totals), note=note)
        if fault is not None:
            return replace(result, skipped=self.judge.act(step, fault))
        if not totals.finite:
            self.scaler.update(finite=False)
            why = f"gradients are not finite at loss scale {result.loss_scale:g}, which is halved"
            return replace(result, skipped=why)
        self.scaler.update(finite=True)
        self._update(step, self.clipping(totals.norm))
        lines = [note]
        for each in self.followers:
            lines.append(each.after_update(step, totals.routing))
        self.optimizer.broadcast_expert_replicas()
        self.judge.record(totals)
        note = "; ".join(filter(None, lines)) or None
        return replace(result, figures=self._figures(), note=note)

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for each in self.followers:
            figures |= each.figures()
        return figures

    def _update(self, step: int, factor: float = 1.0) -> None:
        self.made = step
        self.optimizer.update(self.lr(step), factor)

    def fault(self, totals: StepStats) -> Anomaly | None:
        """Say what cannot be right in a step of these totals; None: nothing, or fp16's gradients
        are not finite, and a smaller loss scale may mend that."""
        if self.scaler.scales and math.isfinite(totals.loss_sum) and not totals.finite:
            problem = self.scaler.problem()
            return None if problem is None else self.judge.not_finite(problem)
        return self.judge.check(totals)

    def _located_fault(self, totals: StepStats) -> Anomaly | None:
        """The same, of gradients that are still there with the tensors and ranks that have them.
        All ranks call it."""
        fault = self.fault(totals)
        if fault is None or totals.finite:
            return fault
        where = self.optimizer.where_not_finite()
        return fault if where is None else fault._replace(text=f"{fault.text}, in {where}")

    def check_states(self) -> None:
        """Raise :class:`~megapipe.train.judge.BadStep` on all ranks, which all call it, where the
        last update has left weights or states that are not finite on one: nobody is to read or save
        them."""
        if self.optimizer.mesh.any(not math.isfinite(self.optimizer.states_finite().item())):
            raise self.states_not_finite()

    def states_not_finite(self) -> BadStep:
        """The error where an update has left values that are not finite."""
        where = self.optimizer.where_not_finite(states=True)
        return self.judge.states_fault(self.optimizer.count, self.made, where)

    def apply_plainly(self, step: int) -> None:
        """Update without clipping by gradients that are known to be finite."""
        self._update(step)
        self.scaler.update(finite=True)

    def is_plain(self, totals: StepStats) -> bool:
        """Whether an update by gradients with these totals neither clips nor skips."""
        return totals.finite and totals.states == 0.0 and self.clipping(totals.norm) == 1.0

    def clipping(self, norm: float) -> float:
        """The factor that brings gradients of this norm down to the largest one; 1 if they are
        below."""
        clip = self.config.clip
        return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))

    def lr(self, step: int) -> float:
        return learning_rate(self.config, step, self.steps)

    def result(self, step: int, totals: StepStats) -> StepResult:
        return StepResult(
            step=step,
            loss=totals.loss,
            grad_norm=totals.norm,
            lr=self.lr(step),
            tokens=totals.tokens,
            loss_scale=self.scaler.scale,
            wishes=totals.wishes,
            by_source=totals.by_source,
            routing=totals.routing,
            figures=self._figures(),
            memory_gib=totals.memory_gib or None,
        )
