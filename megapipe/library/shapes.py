"""Shapes of module outputs, found without computing: on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megapipe.engine.packed import PackedTensor
from megapipe.errors import ConfigError
from megapipe.util.user_code import FAILURES


@torch.no_grad()
def outputs(
    modules: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> list[tuple[PackedTensor, ...]]:
    """Return shape and type of the tensors that each module returns.

    The modules keep their values. Raises :class:`ConfigError` if a module cannot run on the meta
    device, or returns anything but tensors.
    """
    x = tuple(each.to("meta") for each in inputs)
    found = []
    for number, module in enumerate(modules):
        values = {
            name: each.to("meta")
            for named in (module.named_parameters, module.named_buffers)
            for name, each in named(remove_duplicate=False)
        }
        try:
            y: Any = functional_call(module, values, x)
        except FAILURES as error:  # whatever user code raises
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"module {number} fails on the meta device: {text}") from error
        x = y if isinstance(y, tuple) else (y,)
        if not all(isinstance(each, Tensor) for each in x):
            raise ConfigError(
                f"module {number} returns {type(y).__name__}: expected a tensor or a tuple of "
                "tensors"
            )
        found.append(tuple(PackedTensor(tuple(each.shape), each.dtype) for each in x))
    return found
