"""The update of a step, from its totals: loss scale, clipping, learning rate, followers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megapipe.config.config import OptimizerConfig
from megapipe.config.health import HealthConfig
from megapipe.optim.loss_scaler import LossScaler
from megapipe.optim.lr import learning_rate
from megapipe.optim.optimizer import Optimizer
from megapipe.train.anomaly_detection import Anomaly, AnomalyDetector, BadStep
from megapipe.train.fault_replay import FaultReplay, Replay
from megapipe.train.followers import Follower
from megapipe.train.step_stats import RankRequests, SourceStats, StepStats


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal on every rank."""

    step: int
    """Index of the step, counted from 0."""
    loss: float
    """Mean loss per unmasked token of the global batch, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Number of unmasked tokens in the global batch."""
    loss_scale: float = 1.0
    """Loss scale of the backward (fp16)."""
    requests: RankRequests = field(default_factory=RankRequests, compare=False)
    """Requests of all ranks together, at the end of the step."""
    skipped: str | None = None
    """Reason why the update was skipped; None if the update was made."""
    note: str | None = field(default=None, compare=False)
    """A line to print, such as the outcome of a replay, or changes of expert maps."""
    by_source: tuple[SourceStats, ...] = ()
    """Losses and tokens of each source of a mixture."""
    routing: tuple[float, ...] = ()
    """Routing totals, see :class:`~megapipe.train.step_stats.StepStats`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of followers (:mod:`megapipe.train.followers`) after the step, by name."""
    memory_gib: float | None = field(default=None, compare=False)
    """Memory in GiB of the rank that uses most; see :mod:`megapipe.observe.memory`."""
    seconds: float = field(default=math.nan, compare=False)
    """Wall-clock seconds of the step on this rank; known when the step has ended."""

    @property
    def wishes(self) -> RankRequests:
        """Deprecated name of :attr:`requests`, kept for one more release."""
        warnings.warn("StepResult.wishes is called requests", FutureWarning, stacklevel=2)
        return self.requests


class Update:
    """Makes the updates of a run of `steps` steps from gradients that `optimizer` has reduced, and
    updates the `followers`.

    `health` says how anomalies are handled. `exact`: equal computations give equal bits.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: Optimizer,
        scaler: LossScaler,
        followers: Sequence[Follower],
        steps: int,
        health: HealthConfig,
        *,
        exact: bool,
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.scaler = scaler
        self.followers = [each for each in followers if not each.empty]
        self.steps = steps
        self.judge = AnomalyDetector(health)
        self.rerun = FaultReplay(health, exact=exact, fault=self._located_fault)
        self.made = 0
        """Index, from 0, of the step that made the last update."""

    def apply(self, step: int, totals: StepStats, replay: Replay) -> StepResult:
        """Make the update of a step with these `totals` over all ranks, or skip it.

        In case of an anomaly, `replay` first replays the step, and the replay's gradients are used.
        fp16 skips the update if a smaller loss scale may help; ``health.non_finite`` decides about
        other non-finite values. Raises :class:`~megapipe.train.anomaly_detection.BadStep`, before
        the update, if the action is to stop or to rewind.
        """
        if not math.isfinite(totals.states):
            raise self.states_not_finite()
        totals, fault, note = self.rerun.outcome(step, totals, replay)
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
        """Return the anomaly of a step with these `totals`; None if there is no anomaly, or if fp16
        gradients are not finite and a smaller loss scale may help."""
        if self.scaler.scales and math.isfinite(totals.loss_sum) and not totals.finite:
            problem = self.scaler.problem()
            return None if problem is None else self.judge.not_finite(problem)
        return self.judge.check(totals)

    def _located_fault(self, totals: StepStats) -> Anomaly | None:
        """Return the anomaly of a step. For gradients that are not finite, it names tensors and
        ranks; the gradients must still be in memory. Collective."""
        fault = self.fault(totals)
        if fault is None or totals.finite:
            return fault
        where = self.optimizer.where_not_finite()
        return fault if where is None else fault._replace(text=f"{fault.text}, in {where}")

    def check_states(self) -> None:
        """Raise :class:`~megapipe.train.anomaly_detection.BadStep` on all ranks if the last update
        has left non-finite weights or states on any rank: they must not be read or saved.
        Collective."""
        if self.optimizer.mesh.any(not math.isfinite(self.optimizer.states_finite().item())):
            raise self.states_not_finite()

    def states_not_finite(self) -> BadStep:
        """Make the error for an update that has left non-finite weights or states."""
        where = self.optimizer.where_not_finite(states=True)
        return self.judge.states_fault(self.optimizer.count, self.made, where)

    def apply_plainly(self, step: int) -> None:
        """Update without clipping, with gradients that are known to be finite."""
        self._update(step)
        self.scaler.update(finite=True)

    def is_plain(self, totals: StepStats) -> bool:
        """Whether `totals` show only finite values, and the gradients need no clipping."""
        return totals.finite and totals.states == 0.0 and self.clipping(totals.norm) == 1.0

    def clipping(self, norm: float) -> float:
        """Return the factor that clips gradients with norm `norm`; 1 if no clipping is needed."""
        clip = self.config.max_grad_norm
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
            requests=totals.requests,
            by_source=totals.by_source,
            routing=totals.routing,
            figures=self._figures(),
            memory_gib=totals.memory_gib or None,
        )
