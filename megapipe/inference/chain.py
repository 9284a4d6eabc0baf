"""Hidden states on their way through the stages, forward alone.

Messages go one way and are received in the order in which they are sent, so there is no schedule: a
stage sends as soon as it has computed and goes on with the next batch. Each message is sent as
bytes, whatever tensors a family's stages pass on.
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
"""The name of every message: there is one kind."""


class ForwardChannels:
    """This rank's channels from the stage before and to the stage after.

    Args:
        stages: one for each pipeline rank.
    """

    def __init__(self, mesh: ParallelMesh, family: ModelSpec, stages: Sequence[StageSpec]) -> None:
        ranks = pairwise(range(mesh.pp.size))
        channels = PackedChannels(ProcessGroupChannels(mesh, list(ranks), dtype=torch.uint8))
        self._family = family
        self._before = stages[mesh.pp.index - 1]
        self._in = next(iter(channels.incoming.values()), None)
        self._out = next(iter(channels.outgoing.values()), None)

    def receive(self, rows: int, length: int) -> Message:
        """The output of the stage before for so many sequences of `length` tokens; None at the
        first stage."""
        if self._in is None:
            return None
        parts = self._family.output_shape(self._before, rows, length)
        shapes = [PackedTensor(each.shape, getattr(torch, each.dtype)) for each in parts]
        self._in.expect([(_FORWARD, shapes)])
        return self._in.receive()

    def send(self, output: Message) -> None:
        """Send to the stage after; does not wait."""
        assert self._out is not None
        self._out.send(_FORWARD, output)

    def settle(self) -> None:
        """Wait until all that was sent is received."""
        if self._out is not None:
            self._out.finish()
