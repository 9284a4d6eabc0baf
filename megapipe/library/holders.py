"""Gradients of stages that several ranks hold, as in bidirectional schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from megapipe.distributed.collectives import all_reduce
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.errors import ConfigError


class SharedStageGrads:
    """Parameters that several ranks hold, and the groups over which their gradients are summed.

    `parameters` and `holders` have an item for each stage: the stage's parameters, and the ranks
    that hold it, ascending. Construction is collective over all ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        holders: Sequence[tuple[int, ...]],
        mesh: ParallelMesh,
    ) -> None:
        axes: dict[tuple[int, ...], Axis] = {}
        self._shared: dict[Parameter, Axis] = {}
        for own, ranks in zip(parameters, holders, strict=True):
            if len(ranks) == 1 or mesh.rank not in ranks:
                continue
            if ranks not in axes:
                axes[ranks] = mesh.connected(mesh.group_of(ranks))
            self._shared.update({p: axes[ranks] for p in own if p.requires_grad})

    @staticmethod
    def check(
        parameters: Sequence[Sequence[Parameter]], holders: Sequence[tuple[int, ...]]
    ) -> None:
        """Raise :class:`ConfigError` if stages of different ranks share a parameter."""
        seen: dict[Parameter, int] = {}
        for stage, own in enumerate(parameters):
            for parameter in own:
                other = seen.setdefault(parameter, stage)
                if holders[other] != holders[stage]:
                    raise ConfigError(
                        f"modules: stages {other} and {stage} share a parameter of shape "
                        f"{list(parameter.shape)} but are on ranks {list(holders[other])} and "
                        f"{list(holders[stage])}: expected them in one process"
                    )

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum over the holders, at the end of the context, the gradients that were computed in it;
        then add the gradients from before the context."""
        before = {parameter: parameter.grad for parameter in self._shared}
        for parameter in self._shared:
            parameter.grad = None
        yield
        for parameter, axis in self._shared.items():
            new = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            new = all_reduce(new, axis)
            old = before[parameter]
            parameter.grad = new if old is None else old.add_(new)
