"""Gradients of stages that several ranks hold, as those of bidirectional schedules do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from megapipe.distributed.collectives import all_reduce
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.errors import ConfigError


class SharedStageGrads:
    """The parameters that this rank holds together with other ranks, and the groups of these ranks.

    `parameters` and `homes` have an item for each stage: its parameters, and its ranks in ascending
    order. All ranks make this object together.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        homes: Sequence[tuple[int, ...]],
        mesh: ParallelMesh,
    ) -> None:
        axes: dict[tuple[int, ...], Axis] = {}
        self._shared: dict[Parameter, Axis] = {}
        for own, ranks in zip(parameters, homes, strict=True):
            if len(ranks) == 1 or mesh.rank not in ranks:
                continue
            if ranks not in axes:
                axes[ranks] = mesh.connected(mesh.group_of(ranks))
            self._shared.update({p: axes[ranks] for p in own if p.requires_grad})

    @staticmethod
    def check(parameters: Sequence[Sequence[Parameter]], homes: Sequence[tuple[int, ...]]) -> None:
        """Raise :class:`ConfigError` for a parameter in stages of different ranks."""
        seen: dict[Parameter, int] = {}
        for stage, own in enumerate(parameters):
            for parameter in own:
                other = seen.setdefault(parameter, stage)
                if homes[other] != homes[stage]:
                    raise ConfigError(
                        f"modules: stages {other} and {stage} share a parameter of shape "
                        f"{list(parameter.shape)}, and are on ranks {list(homes[other])} and "
                        f"{list(homes[stage])}: expected them in one process"
                    )

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum gradients that arise in the context over the holders; then add the earlier ones."""
        before = {parameter: parameter.grad for parameter in self._shared}
        for parameter in self._shared:
            parameter.grad = None
        yield
        for parameter, axis in self._shared.items():
            new = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            new = all_reduce(new, axis)
            old = before[parameter]
            parameter.grad = new if old is None else old.add_(new)
