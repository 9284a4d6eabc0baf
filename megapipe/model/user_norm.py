"""A user-defined norm: ``model.norm=module:name``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapipe.errors import ConfigError, MegapipeError
from megapipe.util.user_code import FAILURES, UserCode

if TYPE_CHECKING:
    from torch import Tensor

    from megapipe.ops.norm import NormKernel


def load_norm(spec: str) -> NormKernel:
    """Load a user-defined norm. `spec`: ``model.norm``, as ``module:name``.

    Loading the norm and calling it can raise :class:`ConfigError`.
    """
    code = UserCode(spec, what="model.norm=", error=ConfigError)
    code.check_positional(("x", "weight", "bias", "eps"))

    def norm(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: bool = False,
    ) -> Tensor:
        try:
            found: Tensor = code.function(x, weight, bias, eps)
        except (RuntimeError, MegapipeError):  # torch's own errors, e.g. out of memory
            raise
        except FAILURES as error:
            raise code.failed(error) from error
        shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
        if (shape, dtype) != (x.shape, x.dtype):
            returned = type(found).__name__ if shape is None else f"{list(shape)} of {dtype}"
            raise code.problem(f"it returns {returned}: expected {list(x.shape)} of {x.dtype}")
        return found

    return norm
