"""What one micro-batch at a stage really holds."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.model.microbatch import MicroBatch
from megapipe.observe.storages import LiveStorages

_STORED = ("data", "main_grad")
"""Of a parameter."""


class Alive(NamedTuple):
    """What one micro-batch at a stage holds, as sorted sizes of storages in bytes."""

    device: list[int]
    """Between F and I, on the device."""
    host: list[int]
    """Between F and I, copied to the host."""
    queued: list[int]
    """Between I and W."""
    after: list[int]
    """After W."""


def measure(stage: Stage, x: Tensor, mb: MicroBatch) -> Alive:
    """Run one micro-batch through a middle stage, whose input [s(/tp), b, h] is like `x`."""
    stage.begin(train=True)
    stage.forward((0, 0), x, mb)  # makes the rotary tables
    stage.input_grad((0, 0), x)
    stage.weight_grad((0, 0))
    known = [x, *(getattr(p, what) for p in stage.module.parameters() for what in _STORED)]
    if stage.module._rotary is not None:
        known += stage.module._rotary[1]
    with LiveStorages(known) as live:
        y = stage.forward((0, 0), x.clone(), mb)
        assert y is not None
        del y
        settle()
        device, host = live.sizes, live.byte_sizes
        stage.input_grad((0, 0), x.clone())
        settle()
        queued = sorted(live.sizes + live.byte_sizes)
        stage.weight_grad((0, 0))
        settle()
        return Alive(device, host, queued, live.sizes + live.byte_sizes)


def settle() -> None:
    """gloo's thread lets go of a collective's tensors a moment after the collective is done."""
    if dist.is_initialized():
        time.sleep(0.02)
