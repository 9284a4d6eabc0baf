"""A loss that a configuration names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from megapipe.errors import ConfigError, MegapipeError
from megapipe.model.interface import Conditions, Loss
from megapipe.user_code import FAILURES, UserCode

if TYPE_CHECKING:
    from torch import Tensor


def load_loss(given: Conditions) -> Loss | None:
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


def looks_like_a_mean(loss: Loss, vocab_size: int, length: int) -> bool:
    """Whether a loss of logits [b, s, V] is the same for a sequence and for that sequence twice.

    It should be a sum over unmasked tokens: a mean would train with gradients of another scale. A
    loss that takes something else than random logits is not judged.
    """
    import torch

    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, length, vocab_size, generator=rng)
    labels = torch.randint(vocab_size, (1, length), generator=rng)
    mask = torch.ones(1, length, dtype=torch.bool)
    with contextlib.suppress(Exception), torch.no_grad():
        once = float(loss(logits, labels, mask))
        twice = float(loss(logits.repeat(2, 1, 1), labels.repeat(2, 1), mask.repeat(2, 1)))
        return once != 0 and abs(twice - once) < 1e-3 * abs(once)
    return False
