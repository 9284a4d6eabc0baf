"""Point-to-point channels between the stages of a model, for forwards only.

Messages go in one direction and are received in the order in which they are sent, so no schedule is
needed. A stage sends each output as soon as it is computed and continues with the next batch. The
tensors of a message, of whatever types, are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.channels import ProcessGroupChannels
from megapipe.engine.packed import PackedChannels, PackedTensor
from megapipe.model.interface import Message, ModelSpec
from megapipe.model.partition import StageSpec
from megapipe.schedule.ir import Kind, Op

_FORWARD = Op(Kind.F, 0, 0)
"""Name of every message, because forwards are the only kind of operation."""


class ForwardChannels:
    """This rank's channels from the previous stage and to the next one.

    Args: stages: one stage for each pipeline rank.
    """

    def __init__(self, mesh: ParallelMesh, family: ModelSpec, stages: Sequence[StageSpec]) -> None:
        ranks = pairwise(range(mesh.pp.size))
        channels = PackedChannels(ProcessGroupChannels(mesh, list(ranks), dtype=torch.uint8))
        self._family = family
        self._before = stages[mesh.pp.index - 1]
        self._in = next(iter(channels.incoming.values()), None)
        self._out = next(iter(channels.outgoing.values()), None)

    def receive(self, rows: int, length: int) -> Message:
        """Receive the output of the previous stage for `rows` sequences of `length` tokens. Return
        None on the first stage."""
        if self._in is None:
            return None
        parts = self._family.output_shape(self._before, rows, length)
        shapes = [PackedTensor(each.shape, getattr(torch, each.dtype)) for each in parts]
        self._in.expect([(_FORWARD, shapes)])
        return self._in.receive()

    def send(self, output: Message) -> None:
        """Start to send `output` to the next stage, without waiting."""
        assert self._out is not None
        self._out.send(_FORWARD, output)

    def settle(self) -> None:
        """Wait until the next stage has received all messages."""
        if self._out is not None:
            self._out.finish()
