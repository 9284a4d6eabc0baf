"""A user-defined loss: ``train.loss_function=module:name``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megapipe.errors import ConfigError, MegapipeError
from megapipe.model.interface import Loss, RunShape
from megapipe.util.user_code import FAILURES, UserCode, in_one_line

if TYPE_CHECKING:
    from torch import Tensor, device


def load_loss(conditions: RunShape) -> Loss | None:
    """Load the loss that ``train.loss_function`` names; None if the key is not set. Loading the
    loss and calling it can raise :class:`ConfigError`."""
    if conditions.loss is None:
        return None
    code = UserCode(conditions.loss, what="train.loss_function=", error=ConfigError)
    code.check_positional(("logits", "labels", "mask"))

    def loss(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
        try:
            found: Tensor = code.function(output, labels, mask)
        except (RuntimeError, MegapipeError):  # torch's own errors, e.g. out of memory
            raise
        except FAILURES as error:  # whatever user code raises
            raise code.failed(error) from error
        shape = getattr(found, "shape", None)
        if shape != ():
            returned = type(found).__name__ if shape is None else f"shape {list(shape)}"
            raise code.problem(f"it returns {returned}: expected a sum, a tensor of shape []")
        return found

    return loss


class SumCheck:
    """A user-defined loss with a check that it is a sum over unmasked tokens, not a mean.

    With a mean, gradients would have another scale. The first call after :meth:`start` also
    computes the loss of a batch with every sample twice: a sum doubles, a mean does not change. If
    that fails, it computes the losses of the batch's two halves. Random numbers in the loss may
    differ between the calls, so the result only has to be nearer to a sum than to a mean.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        """The user-defined loss without the check."""
        self._due = False
        self.finding: str | None = None
        """Problem, as the end of a sentence: the loss is not a sum, or could not be checked.
        None: no problem."""

    def start(self) -> None:
        """Request the check at the next call of the loss."""
        self._due = True

    def __call__(self, output: Any, labels: Tensor, mask: Tensor) -> Tensor:
        if not self._due:
            return self.loss(output, labels, mask)
        self._due = False
        # before the loss itself, which may overwrite its arguments
        others, problem = self._of_other_rows(output, labels, mask)
        found = self.loss(output, labels, mask)
        self.finding = problem or _finding(float(found.detach()), others)
        return found

    def _of_other_rows(
        self, output: Any, labels: Tensor, mask: Tensor
    ) -> tuple[list[float], str | None]:
        """Return the loss of a batch with every sample twice, or if that fails the losses of the
        batch's two halves. If both fail, return no losses and an error message."""
        rows = len(labels)
        every = list(range(rows))
        problem = None
        for parts in ([every * 2], [every[: rows // 2], every[rows // 2 :]]):
            if not all(parts):
                break
            try:
                return [self._of_rows(part, output, labels, mask) for part in parts], None
            except FAILURES as error:
                problem = problem or in_one_line(error.__cause__ or error)
        return [], (
            f"could not be checked to be a sum, because it fails for twice the samples: {problem}"
        )

    def _of_rows(self, numbers: list[int], output: Any, labels: Tensor, mask: Tensor) -> float:
        """Compute the loss of the samples with indices `numbers`; an index can occur twice."""
        import torch
        from torch.utils._pytree import tree_map

        rows = len(labels)
        chosen = torch.tensor(numbers, device=labels.device)

        def selected(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.dim():
                return x
            if rows in x.shape:  # [b, s, ...] or [s, b, ...]
                return x.index_select(x.shape.index(rows), chosen)
            if len(x) % rows:
                return x
            return x.unflatten(0, (rows, -1)).index_select(0, chosen).flatten(0, 1)  # [b s, ...]

        with torch.no_grad(), _same_random_numbers(labels.device):
            return float(self.loss(*tree_map(selected, (output, labels, mask))))


@contextmanager
def _same_random_numbers(device: device) -> Iterator[None]:
    """Restore the random states of torch, numpy and Python after the context."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _finding(once: float, others: list[float]) -> str | None:
    """Say what is wrong with a loss; None if it is a sum. `once`: the loss of the batch. `others`:
    the loss of the batch with every sample twice, or the losses of its two halves."""
    other, rows = sum(others), "its samples twice" if len(others) == 1 else "its halves together"
    if not once or not math.isfinite(once + other):
        return (
            f"could not be checked to be a sum: it is {once:g} for the first micro-batch, and "
            f"{other:g} for {rows}"
        )
    of_a_mean = once * len(others)
    if abs(other - of_a_mean) >= abs(once) / 2:
        return None
    return (
        f"is {once:g} for the first micro-batch and {other:g} for {rows}, as a mean would be: "
        "expected the sum over unmasked tokens, or gradients have another scale"
    )
