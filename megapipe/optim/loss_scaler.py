"""Loss scaling for fp16 (Micikevicius et al., 1710.03740).

Gradients below fp16's smallest value would vanish in the backward. So the loss is multiplied by a
scale before the backward, and gradients are divided by the scale after it. The scale is a power of
two, so that neither operation rounds. A dynamic scale is doubled after a number of good steps,
whose gradients are finite. A gradient that is not finite means that the scale was too large: the
step is skipped and the scale halved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from megapipe.checkpoint.stateful import Stateful
from megapipe.config.config import OptimizerConfig
from megapipe.errors import NumericError
from megapipe.util.dtypes import Dtype

FIRST = 2.0**16
LARGEST = 2.0**24
SMALLEST = 1.0


class LossScaler(Stateful):
    """Loss scale of the next backward; 1 for models that are not fp16."""

    name = "loss_scale"
    kind = dict[str, float]

    def __init__(self, config: OptimizerConfig, dtype: Dtype) -> None:
        self.scales = dtype == "fp16"
        """Whether the loss is scaled: only for fp16 models, whose gradients may be out of range."""
        self.dynamic = self.scales and config.loss_scale is None
        self.window = config.loss_scale_window
        self.good_steps = 0
        """Number of steps with finite gradients since the scale last changed."""
        self.scale = 1.0
        if self.scales:
            self.scale = config.loss_scale or FIRST

    def update(self, *, finite: bool) -> bool:
        """Adjust the scale to the reduced gradients; return whether they may update weights.

        `finite`: whether all gradients are finite, equal on all ranks. If it is false, raises
        NumericError if the scale cannot be reduced: it is fixed, or already the smallest.
        """
        if finite:
            self._count_good_step()
            return True
        problem = self.problem()
        if problem is not None:
            raise NumericError(problem)
        self.scale = max(self.scale / 2, SMALLEST)
        self.good_steps = 0
        return False

    def problem(self) -> str | None:
        """Return why the scale cannot be reduced further; None if it can."""
        if not self.dynamic:
            return (
                f"gradients are not finite at the fixed loss scale {self.scale:g}: expected a "
                "smaller optimizer.loss_scale, null for a dynamic one, or a lower optimizer.lr"
            )
        if self.scale <= SMALLEST:
            return (
                f"gradients are not finite at loss scale {self.scale:g}, the smallest: fp16 does "
                "not hold them; lower optimizer.lr, or use model.dtype=bf16"
            )
        return None

    def _count_good_step(self) -> None:
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale = min(2 * self.scale, LARGEST)
            self.good_steps = 0

    def state(self) -> dict[str, JsonValue]:
        """Return the state for a checkpoint, as JSON."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, stored: Mapping[str, Any] | None) -> None:
        """Restore the result of :meth:`state`; a fixed scale stays as configured.

        Raises ValueError if `stored` is not valid.
        """
        if not self.dynamic or not stored:
            return
        scale, good_steps = stored.get("scale", 0.0), stored.get("good_steps", -1)
        if not SMALLEST <= scale <= LARGEST or good_steps < 0 or good_steps % 1:
            raise ValueError(
                f"the loss scale's state is {dict(stored)}: expected a scale from {SMALLEST:g} to "
                f"{LARGEST:g} and a number of steps"
            )
        self.scale = float(scale)
        self.good_steps = min(int(good_steps), self.window - 1)
