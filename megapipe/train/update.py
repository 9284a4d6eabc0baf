"""From the totals of a step to its update: loss scale, clipping, learning rate, result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megapipe.config import OptimizerConfig
from megapipe.errors import NumericError
from megapipe.optim.lr import learning_rate
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.scaler import LossScaler
from megapipe.train.totals import SourceTotal, Totals, Wishes


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean loss per unmasked token of the global batch, nats."""
    grad_norm: float
    """Global gradient norm before clipping; not finite where the step was skipped."""
    lr: float
    tokens: int
    """Unmasked tokens in the global batch."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass (fp16)."""
    wishes: Wishes = field(default_factory=Wishes, compare=False)
    """Requests of all ranks together, at the end of the step."""
    by_source: tuple[SourceTotal, ...] = ()
    """Of a mixture: losses and tokens of each source."""
    memory_gib: float | None = field(default=None, compare=False)
    """Memory of the fullest rank; see :mod:`megapipe.observe.memory`."""
    seconds: float = field(default=math.nan, compare=False)
    """Wall time of the step on this rank; known when the step has ended."""


class Update:
    """Makes the updates of a run of `steps`, whose gradients `optimizer` has reduced."""

    def __init__(
        self, config: OptimizerConfig, optimizer: Optimizer, scaler: LossScaler, steps: int
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.scaler = scaler
        self.steps = steps

    def apply(self, step: int, totals: Totals) -> StepResult:
        """Update by gradients with these totals of all ranks; fp16 may skip the update instead.

        Raises :class:`NumericError`, before the update, where loss or gradients are not finite and
        no smaller loss scale could mend that.
        """
        result = self.result(step, totals)
        if not math.isfinite(totals.states):
            raise self._states_not_finite()
        overflow = self.scaler.scales and math.isfinite(totals.loss_sum)
        if not totals.finite and not overflow:
            raise NumericError(
                f"step {step + 1}: loss {result.loss}, gradient norm {result.grad_norm} "
                f"({totals.not_finite()}): not finite; "
                "lower optimizer.lr or resume from an earlier checkpoint"
            )
        if self.scaler.update(finite=totals.finite):
            self.optimizer.update(result.lr, self.clipping(totals))
        return result

    def check_states(self) -> None:
        """Raise :class:`NumericError` on all ranks, which all call it, where the last update has
        left weights or states that are not finite on one: nobody is to read or save them."""
        if self.optimizer.mesh.any(not math.isfinite(self.optimizer.states_finite().item())):
            raise self._states_not_finite()

    def _states_not_finite(self) -> NumericError:
        return NumericError(
            f"update {self.optimizer.count} has left weights or optimizer states that are not "
            "finite, and is not saved; lower optimizer.lr or optimizer.clip, or resume from an "
            "earlier checkpoint"
        )

    def apply_plainly(self, step: int) -> None:
        """Update without clipping by gradients that are known to be finite."""
        self.optimizer.update(self.lr(step))
        self.scaler.update(finite=True)

    def is_plain(self, totals: Totals) -> bool:
        """Whether an update by gradients with these totals neither clips nor skips."""
        return totals.finite and totals.states == 0.0 and self.clipping(totals) == 1.0

    def clipping(self, totals: Totals) -> float:
        """The factor that brings gradients down to the largest norm; 1 if they are below."""
        clip = self.config.clip
        return 1.0 if clip is None else min(1.0, clip / (totals.norm + 1e-6))

    def lr(self, step: int) -> float:
        return learning_rate(self.config, step, self.steps)

    def result(self, step: int, totals: Totals) -> StepResult:
        return StepResult(
            step=step,
            loss=totals.loss,
            grad_norm=totals.norm,
            lr=self.lr(step),
            tokens=totals.tokens,
            loss_scale=self.scaler.scale,
            wishes=totals.wishes,
            by_source=totals.by_source,
            memory_gib=totals.memory_gib or None,
        )
