"""A user-defined loss is checked at the first micro-batch to be a sum."""

from __future__ import annotations

from megapipe.model.gpt.stage import GPTStage
from megapipe.model.modules.stage import ModuleStage
from megapipe.model.own_loss import SumCheck
from megapipe.train.callbacks.callback import Callback, Run, Step


class LossCheck(Callback):
    """Tells in one line of a ``train.loss`` that is no sum, or that could not be checked."""

    def __init__(self) -> None:
        self._told = False
        self._check: SumCheck | None = None

    def begin(self, run: Run) -> None:
        """Put the check in the place of the loss, on every rank with the last stage, as the loss
        may communicate with other replicas."""
        module = _last_module(run)
        if module is not None and module.loss is not None:
            module.loss = self._check = SumCheck(module.loss)
            run.train_step.when_warm = self._check.start

    def after_step(self, run: Run, step: Step) -> None:
        """Tell what the first step has found, and take the check away."""
        if self._told:
            return
        self._told = True
        found, module = None, _last_module(run)
        if self._check is not None and module is not None:
            module.loss, found = self._check.loss, self._check.finding
        elif run.train_step.last is not None:
            found = "could not be checked to be a sum: model.source computes it"
        # one replica speaks, as others have other rows
        line = run.mesh.agree(found if run.mesh.at._replace(pp=0) == (0, 0, 0, 0) else None)
        if line is not None:
            run.note(f"train.loss={run.config.train.loss} {line}")


def _last_module(run: Run) -> GPTStage | ModuleStage | None:
    """Return the last stage of the model, where it is here and calls the loss as megapipe does."""
    last = run.train_step.last
    module = None if last is None else last.module
    return module if isinstance(module, (GPTStage, ModuleStage)) else None
