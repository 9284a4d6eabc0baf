"""A loss that a configuration names."""

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


def load_loss(given: RunShape) -> Loss | None:
    """The loss that ``train.loss`` names, if any. Raises :class:`ConfigError`, as the loss may."""
    if given.loss is None:
        return None
    code = UserCode(given.loss, what="train.loss=", error=ConfigError)
    code.check_positional(("logits", "labels", "mask"))

    def loss(output: Any, labels: Tensor, mask: Tensor) -> Tensor:
        try:
            found: Tensor = code.function(output, labels, mask)
        except (RuntimeError, MegapipeError):  # torch's own, such as memory that is used up
            raise
        except FAILURES as error:  # whatever the user's code raises
            raise code.failed(error) from error
        shape = getattr(found, "shape", None)
        if shape != ():
            returned = type(found).__name__ if shape is None else f"shape {list(shape)}"
            raise code.problem(f"it returns {returned}: expected a sum, a tensor of shape []")
        return found

    return loss


class SumCheck:
    """A user-defined loss that is checked, once, to be a sum over unmasked tokens.

    A mean would train with gradients of another scale. The first call after :meth:`start` also
    computes the loss of the same rows twice, which doubles a sum and leaves a mean as it is. A loss
    that cannot be computed of twice the rows is computed of both halves. Random numbers of the loss
    may differ between the two, so the result only has to be nearer to that of a sum.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        """The loss as it was given."""
        self._due = False
        self.finding: str | None = None
        """The end of a sentence on a loss that is no sum, or that could not be checked."""

    def start(self) -> None:
        """Check the loss at the next call."""
        self._due = True

    def __call__(self, output: Any, labels: Tensor, mask: Tensor) -> Tensor:
        if not self._due:
            return self.loss(output, labels, mask)
        self._due = False
        # before the loss itself, which may write into what it is given
        others, problem = self._of_other_rows(output, labels, mask)
        found = self.loss(output, labels, mask)
        self.finding = problem or _finding(float(found.detach()), others)
        return found

    def _of_other_rows(
        self, output: Any, labels: Tensor, mask: Tensor
    ) -> tuple[list[float], str | None]:
        """Compute the loss of all rows twice, or else of each half; with what is wrong, where
        neither can be computed."""
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
        return [], f"could not be checked to be a sum, as it fails for twice the rows: {problem}"

    def _of_rows(self, numbers: list[int], output: Any, labels: Tensor, mask: Tensor) -> float:
        """Compute the loss of copies of the rows with these numbers."""
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
    """Leave the generators of torch, numpy and Python as they are."""
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
    """Describe what is wrong with a loss that is `once` for all rows and, as `others`, one number
    for these rows twice or two for their halves; None: it is a sum."""
    other, rows = sum(others), "its rows twice" if len(others) == 1 else "its halves together"
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
