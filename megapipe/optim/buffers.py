"""Contiguous parameter and gradient buffers, one bucket per virtual stage.

A bucket holds a stage's parameters in the model dtype and their main gradients in fp32 (fp64 for
fp64), each as one flat array, so that reducing, sharding and gathering are one call per stage.
Parameters are ordered by :class:`Region`: those that decay before those that do not, split ones
before those that every tp rank holds; weight decay and the norm then act on a few ranges.

A stage that several pipeline ranks hold (bidirectional pipelines) has a bucket that they share:
its shard group is dp x holders, so one owner updates a slice and all holders gather it, and the
copies stay bitwise equal. So has a tied embedding, which the first and the last stage use; the two
uses accumulate into gradients of their own and are added once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.mesh import Axis, ParallelMesh
from megapipe.model.gpt import GPTStage
from megapipe.plan.params import WORD_EMBEDDING
from megapipe.tensor_parallel.parameter import ParameterSpec, spec_of


class Owned(NamedTuple):
    """A parameter and where in a model it stands."""

    module: nn.Module
    name: str
    parameter: Parameter

    def replace(self, new: Parameter) -> None:
        """Put `new`, which has the storage that this one lacks, in its place."""
        cast(Any, new).spec = spec_of(self.parameter)
        self.module._parameters[self.name] = new


def owned_parameters(module: nn.Module) -> Iterator[Owned]:
    """All parameters of a module, one by one also where two share a name."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield Owned(owner, name, parameter)


class Entry(NamedTuple):
    """A parameter's place [start, stop) in its bucket."""

    spec: ParameterSpec
    start: int
    stop: int


class Region(NamedTuple):
    """A range of a bucket whose parameters share these properties."""

    decay: bool
    split: bool
    """Split over tp; otherwise every tp rank holds the same values."""
    start: int
    stop: int


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of main gradients, master weights and optimizer state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Bucket:
    """Flat weights and main gradients of one stage, or of the tied embedding.

    `index` is the stage number; the tied bucket's is the number of stages. `axis` is the group
    over which gradients are summed and the optimizer is sharded; lengths are padded to it.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[Owned],
        axis: Axis,
        device: torch.device,
    ) -> None:
        self.index = index
        self.axis = axis
        self.entries: list[Entry] = []
        uses = sorted({spec_of(owned.parameter).replica for owned in parameters})
        ordered = sorted(parameters, key=lambda owned: _region_key(spec_of(owned.parameter)))
        places: dict[str, Entry] = {}
        stop = 0
        for owned in ordered:
            spec = spec_of(owned.parameter)
            if spec.name not in places:
                places[spec.name] = Entry(spec, stop, stop + spec.numel)
                stop += spec.numel
        self.entries = list(places.values())
        self.numel = -(-stop // axis.size) * axis.size
        dtype = ordered[0].parameter.dtype
        self.weights = torch.zeros(self.numel, dtype=dtype, device=device)
        self.grads = [torch.zeros(self.numel, dtype=main_dtype(dtype), device=device) for _ in uses]
        for owned in ordered:
            spec = spec_of(owned.parameter)
            entry = places[spec.name]
            new = Parameter(self.view(self.weights, entry))
            grads = self.grads[uses.index(spec.replica)]
            cast(Any, new).main_grad = self.view(grads, entry)
            owned.replace(new)

    @staticmethod
    def view(flat: Tensor, entry: Entry) -> Tensor:
        return flat[entry.start : entry.stop].view(entry.spec.sizes)

    def regions(self) -> Iterator[Region]:
        """The ranges of equal properties, in order."""
        start = 0
        for i, entry in enumerate(self.entries):
            key = _region_key(entry.spec)
            last = i + 1 == len(self.entries)
            if last or _region_key(self.entries[i + 1].spec) != key:
                yield Region(not key[0], not key[1], start, entry.stop)
                start = entry.stop

    def add_uses(self) -> None:
        """Add the gradients of all uses into the first; the order of uses is fixed."""
        for other in self.grads[1:]:
            self.grads[0] += other

    def zero_grad(self) -> None:
        for grad in self.grads:
            grad.zero_()


def _region_key(spec: ParameterSpec) -> tuple[bool, bool]:
    return not spec.decay, spec.split_dim is None


def make_buckets(
    modules: Mapping[int, GPTStage],
    mesh: ParallelMesh,
    *,
    tied: bool,
    holders: Sequence[Sequence[int]],
) -> list[Bucket]:
    """Give the parameters of this process' stages their storage.

    holders[stage] are the pipeline indices of the processes that hold a stage. A stage with
    several holders, and `tied` embeddings, which the first and the last stage hold, are reduced
    over them too. Buckets come in stage order, the tied last.
    """
    axes: dict[tuple[int, ...], Axis] = {}

    def axis_of(pp_indices: Sequence[int]) -> Axis:
        key = tuple(sorted(set(pp_indices)))
        if len(key) == 1:
            return mesh.dp
        if key not in axes:
            axes[key] = mesh.connected(mesh.group_of(mesh.grid.holders(mesh.rank, key)))
        return axes[key]

    buckets = []
    shared: list[Owned] = []
    for stage, module in sorted(modules.items()):
        own: list[Owned] = []
        for owned in owned_parameters(module):
            is_shared = tied and spec_of(owned.parameter).name == WORD_EMBEDDING
            (shared if is_shared else own).append(owned)
        if own:
            buckets.append(Bucket(stage, own, axis_of(holders[stage]), mesh.device))
    if shared:
        axis = axis_of([*holders[0], *holders[-1]])
        buckets.append(Bucket(len(holders), shared, axis, mesh.device))
    return buckets
