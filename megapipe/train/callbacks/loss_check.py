"""A check, at the first micro-batch, that a user-defined loss is a sum over tokens, not a mean."""

from __future__ import annotations

from megapipe.model.gpt.stage import GPTStage
from megapipe.model.modules.stage import ModuleStage
from megapipe.model.user_loss import SumCheck
from megapipe.train.callbacks.callback import Callback, Run, Step


class LossCheck(Callback):
    """Prints a line if ``train.loss_function`` is not a sum over tokens or cannot be checked."""

    def __init__(self) -> None:
        self._reported = False
        self._check: SumCheck | None = None

    def begin(self, run: Run) -> None:
        """Wrap the loss in the check on every rank with the last stage, because the loss may
        communicate with other replicas."""
        module = _last_module(run)
        if module is not None and module.loss is not None:
            module.loss = self._check = SumCheck(module.loss)
            run.train_step.when_warm = self._check.start

    def after_step(self, run: Run, step: Step) -> None:
        """Print what the check has found in the first step, and remove the check."""
        if self._reported:
            return
        self._reported = True
        found, module = None, _last_module(run)
        if self._check is not None and module is not None:
            module.loss, found = self._check.loss, self._check.finding
        elif run.train_step.last is not None:
            found = "could not be checked to be a sum: model.source computes it"
        # one replica prints, as others have other samples
        line = run.mesh.agree(found if run.mesh.at._replace(pp=0) == (0, 0, 0, 0) else None)
        if line is not None:
            run.note(f"train.loss_function={run.config.train.loss_function} {line}")


def _last_module(run: Run) -> GPTStage | ModuleStage | None:
    """Return the model's last stage, if it is local and is of a type that calls ``loss``."""
    last = run.train_step.last
    module = None if last is None else last.module
    return module if isinstance(module, (GPTStage, ModuleStage)) else None
