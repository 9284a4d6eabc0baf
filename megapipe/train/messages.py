"""Shapes of the messages that stages send each other, and how early receives are posted."""

from __future__ import annotations

from typing import Any

import torch

from megapipe.config.config import Config, TrainConfig
from megapipe.engine.channels import MessageShape
from megapipe.engine.packed import PackedTensor
from megapipe.layout.layout import Layout
from megapipe.schedule.ir import Kind, Op, Schedule


class MessageShapes:
    """Shapes of the messages of a layout."""

    def __init__(self, layout: Layout, train: TrainConfig) -> None:
        self._layout = layout
        self._train = train

    def of_schedule(self, schedule: Schedule) -> MessageShape:
        """Return a function from an operation to the shapes of its message: a stage's output, or
        the gradient of its input. This gradient has the shape of the previous stage's output."""
        train, layout = self._train, self._layout
        lengths = layout.local_lengths if schedule.slices > 1 else (layout.local_length,)

        def shape(message: Op) -> Any:
            rows = int(schedule.size_of(message.microbatch) * train.microbatch)
            return self.of_size(rows, lengths[message.slice])(message)

        return shape

    def of_size(self, rows: int, length: int) -> MessageShape:
        """Return a function from an operation to the shapes of its message, for work items of
        `rows` samples and `length` local positions."""

        def shape(message: Op) -> Any:
            before = message.stage - (message.kind != Kind.F)
            tensors = self._layout.model.output_shape(
                self._layout.stage_layers[before], rows, length
            )
            if not self._layout.sends_tuples:
                return tensors[0].shape
            if message.kind != Kind.F:
                tensors = tuple(each for each in tensors if each.has_grad)
            return [PackedTensor(each.shape, getattr(torch, each.dtype)) for each in tensors]

        return shape


def receive_ahead(config: Config, layout: Layout, device: torch.device) -> int | None:
    """Return the number of operations by which receives are posted early; None: the default.

    The number is 0 on a GPU with experts, or with attention tiles that end at documents. Then any
    step may have new sizes, of experts' rows or of tiles. Kernels are loaded and memory is
    allocated for new sizes, and both may wait for everything that runs.
    """
    by_documents = layout.uses_attention_tiles and config.data.masks_documents
    if device.type == "cuda" and (by_documents or config.model.moe.num_experts is not None):
        return 0
    return config.pipeline.recv_prefetch
