"""Whether the numbers of a step can be right, and what is done where they cannot.

All ranks judge by the same totals, so they judge alike.
"""

from __future__ import annotations

from megapipe.errors import NumericError
from megapipe.numbers_config import NumbersConfig
from megapipe.train.totals import Totals
from megapipe.words import counted

ADVICE = "lower optimizer.lr or resume from an earlier checkpoint"


class Unsound(NumericError):
    """A step must not be built upon: it has made no update, or one that has to be taken back.

    `step` is the one whose samples are to blame, counted from 0. `rewinds` says whether the run is
    to go back to a checkpoint.
    """

    def __init__(self, text: str, step: int, *, rewinds: bool) -> None:
        super().__init__(text)
        self.step = step
        self.rewinds = rewinds


class Judge:
    """Judges the steps of a run, one after the other."""

    def __init__(self, config: NumbersConfig) -> None:
        self._config = config
        self._skipped = 0
        """Steps in a row that were made without an update, by the policy."""

    def fault(self, totals: Totals) -> str | None:
        """Say what is wrong with a step of these totals; None: nothing."""
        if not totals.finite:
            return (
                f"loss {totals.loss}, gradient norm {totals.norm} ({totals.not_finite()}): "
                "not finite"
            )
        return None

    def passed(self) -> None:
        """Note a step that was made with an update."""
        self._skipped = 0

    def act(self, step: int, fault: str) -> str:
        """Act on a step, counted from 0, that has a fault: returns why it is to be made without an
        update, or raises :class:`Unsound`."""
        action = self._config.non_finite
        told = f"step {step + 1}: {fault}"
        if action == "stop":
            raise Unsound(f"{told}; {ADVICE}", step, rewinds=False)
        if action == "rewind":
            raise Unsound(told, step, rewinds=True)
        self._skipped += 1
        if self._skipped > self._config.most_skipped:
            steps = counted(self._skipped, "step")
            raise Unsound(
                f"{told}; {steps} in a row, where numbers.most_skipped="
                f"{self._config.most_skipped}; {ADVICE}",
                step,
                rewinds=False,
            )
        return fault

    def states_fault(self, updates: int, step: int) -> Unsound:
        """The error where update number `updates`, that of `step`, has left values that are not
        finite; skip cannot mend that."""
        told = f"update {updates} has left weights or optimizer states that are not finite"
        if self._config.non_finite == "rewind":
            return Unsound(f"{told}, and is not saved", step, rewinds=True)
        return Unsound(
            f"{told}, and is not saved; lower optimizer.lr or optimizer.clip, or resume from an "
            "earlier checkpoint",
            step,
            rewinds=False,
        )

    def state(self) -> dict[str, int]:
        """Its state for a checkpoint, as JSON takes it."""
        return {"skipped": self._skipped}

    def load(self, state: object) -> None:
        """Go on from a :meth:`state`; from anything else as from the start."""
        skipped = state.get("skipped") if isinstance(state, dict) else None
        self._skipped = skipped if type(skipped) is int else 0
