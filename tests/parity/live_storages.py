"""Storages that one micro-batch at a stage really holds."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.layers.moe.experts import expert_layers

_STORED = ("data", "main_grad")
"""Attributes of a parameter that hold storage."""


def known_of(stage: Stage, *inputs: Tensor) -> list[Tensor]:
    """Return the tensors of a stage that exist without a micro-batch."""
    known = [
        getattr(p, what) for p in stage.module.parameters() for what in _STORED if hasattr(p, what)
    ]
    places = [each.replicas for each in expert_layers(stage.module) if each.replicas is not None]
    copies = [tensor for each in places for tensor in each.tensors()]
    constants = getattr(stage.module, "constants", list)()
    return [*inputs, *known, *copies, *stage.module.buffers(), *constants]


def settle(seconds: float = 0.02) -> None:
    """Wait for gloo's thread, which frees a collective's tensors a moment after it is done."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        time.sleep(seconds)
