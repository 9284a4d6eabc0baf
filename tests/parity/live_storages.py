"""What one micro-batch at a stage really holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.layers.experts import expert_layers
from megapipe.layers.microbatch import MicroBatch
from megapipe.ops.storages import LiveStorages

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
    within: dict[str, int]
    """Most bytes within F, I, W, and B, on the device."""


def measure(stage: Stage, x: Tensor, mb: MicroBatch) -> Alive:
    """Run one micro-batch through a middle stage, whose input [s(/tp), b, h] is like `x`."""
    stage.begin(train=True)
    stage.forward((0, 0), x, mb)  # makes the rotary tables
    stage.input_grad((0, 0), x)
    stage.weight_grad((0, 0))
    with LiveStorages(known_of(stage, x)) as live:
        within = {}

        def peak() -> int:
            found, live.peak = live.peak, live.bytes
            return found

        y = stage.forward((0, 0), x.clone(), mb)
        assert y is not None
        del y
        settle()
        within["F"] = peak()
        device, host = live.sizes, live.host_sizes
        stage.input_grad((0, 0), x.clone())
        settle()
        within["I"] = peak()
        queued = sorted(live.sizes + live.host_sizes)
        stage.weight_grad((0, 0))
        settle()
        within["W"] = peak()
        after = live.sizes + live.host_sizes
        stage.begin(train=True)
        stage.forward((0, 0), x.clone(), mb)
        settle()
        peak()
        stage.backward((0, 0), x.clone())
        settle()
        within["B"] = peak()
        return Alive(device, host, queued, after, within)


def measure_slices(
    stage: Stage, inputs: Sequence[Tensor], mbs: Sequence[MicroBatch]
) -> list[list[int]]:
    """Run the slices of one micro-batch through a middle stage, whose inputs [slice, b, h] are like
    `inputs`: sorted sizes after each F, and in descending order after each I and W."""
    moments = []
    stage.begin(train=True)
    stage.forward((0, 0), inputs[0], mbs[0])  # makes the rotary tables
    stage.begin(train=True)
    with LiveStorages(known_of(stage, *inputs)) as live:
        for j, (x, mb) in enumerate(zip(inputs, mbs, strict=True)):
            stage.forward((0, j), x.clone(), mb)
            moments.append(live.sizes)
        for j in reversed(range(len(inputs))):
            stage.input_grad((0, j), inputs[j].clone())
            moments.append(live.sizes)
            stage.weight_grad((0, j))
            moments.append(live.sizes)
    return moments


def known_of(stage: Stage, *inputs: Tensor) -> list[Tensor]:
    """What is there without a micro-batch."""
    known = [
        getattr(p, what) for p in stage.module.parameters() for what in _STORED if hasattr(p, what)
    ]
    places = [each.places for each in expert_layers(stage.module) if each.places is not None]
    copies = [tensor for each in places for tensor in each.tensors()]
    constants = getattr(stage.module, "constants", list)()
    return [*inputs, *known, *copies, *stage.module.buffers(), *constants]


def settle(seconds: float = 0.02) -> None:
    """gloo's thread lets go of a collective's tensors a moment after the collective is done."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        time.sleep(seconds)
