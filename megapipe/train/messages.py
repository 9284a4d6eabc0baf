"""The tensors that stages send each other."""

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
        """The tensors of a message, by what produced it: the output of a stage, or the gradient of
        its input, which is the output of the stage before."""
        train, layout = self._train, self._layout
        lengths = layout.local_lengths if schedule.slices > 1 else (layout.local_length,)

        def shape(message: Op) -> Any:
            rows = int(schedule.size_of(message.microbatch) * train.microbatch)
            return self.of_size(rows, lengths[message.slice])(message)

        return shape

    def of_size(self, rows: int, length: int) -> MessageShape:
        """The same for so many sequences of `length` tokens."""

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
    """Operations by which receives are posted ahead of need; None: the default of the channels.

    0 on a GPU where attention goes by blocks that end at documents, or layers have experts: blocks
    and the rows of an expert have new sizes in any step, for which kernels may be loaded and memory
    found, and both may wait for all that runs.
    """
    by_documents = layout.uses_attention_tiles and config.data.masks_documents
    if device.type == "cuda" and (by_documents or config.model.moe.experts is not None):
        return 0
    return config.pipeline.receive_ahead
