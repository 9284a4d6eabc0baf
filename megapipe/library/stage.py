"""A stage of unchanged modules: parameters keep their storage, gradients go to ``.grad``.

Autograd computes all gradients within ``I``, so a ``W`` has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import Axis
from megapipe.errors import ConfigError
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.model.modules.stage import ModuleStage


@dataclass(frozen=True)
class TensorMicroBatch(MicroBatch):
    """A micro-batch of arbitrary tensors; the first dimension of each counts samples."""

    inputs: tuple[Tensor, ...] = ()
    """Arguments of the first module."""
    targets: tuple[Tensor, ...] = ()
    """Arguments of the loss, after the output."""


class PlainStage(ModuleStage):
    """Stage of consecutive modules, given by their indices in the pipeline's list.

    The last stage returns the loss, `criterion`(output, targets), [].
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        *,
        first: bool,
        last: bool,
        criterion: Callable[..., Tensor],
    ) -> None:
        sharding = Sharding(Axis.alone(), False, torch.get_default_dtype())
        super().__init__(modules, [], sharding, first=first, last=last)
        self.criterion = criterion

    def forward(
        self, x: Any, mb: MicroBatch, cache: KVCache | None = None, *, skip_output: bool = False
    ) -> Any:
        """Return the output, or the loss. Values are computed even with `skip_output`."""
        assert isinstance(mb, TensorMicroBatch)
        y = self.run(mb.inputs if self.is_first else x, mb)
        if not self.is_last:
            return self._passed_on(y)
        loss = self.criterion(y, *mb.targets)
        if not isinstance(loss, Tensor) or loss.dim():
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss= returns {found}: expected a tensor of one number, []")
        return _node(loss)

    def _passed_on(self, y: Any) -> Any:
        """Return the output of this stage's last module, each tensor as a node of the graph."""
        number = list(self.layers)[-1]
        tensors = y if isinstance(y, tuple) else (y,)
        if not all(isinstance(each, Tensor) for each in tensors):
            raise ConfigError(
                f"module {number} returns {type(y).__name__}: expected a tensor or a tuple of "
                "tensors, as the pipeline is cut behind it"
            )
        if not any(each.is_floating_point() for each in tensors):
            raise ConfigError(
                f"module {number} returns only integers, so no gradient flows through it: "
                "expected another layout="
            )
        return tuple(map(_node, y)) if isinstance(y, tuple) else _node(y)


def _node(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` that has an autograd node, even if `tensor` needs no gradient."""
    if tensor.is_floating_point() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return tensor.view_as(tensor)
