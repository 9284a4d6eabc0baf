"""A loss that a configuration names."""

from __future__ import annotations

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
