"""One process that plays a rank of any world: torch's fake process group, watched.

Collectives of the fake backend return at once; a process gathers copies of its own tensor. Their
arguments are counted where Python hands them to torch's C++ process groups, below the product.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.distributed.mesh import AXES, Grid, ParallelMesh
from megapipe.distributed.planned import COLLECTIVES
from megapipe.layers.moe import routers
from megapipe.ops import attention
from megapipe.optim.optimizer import Optimizer

_COUNTED = {
    **COLLECTIVES,
    "allgather": ("all_gather", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
"""For each method of ProcessGroup: the collective, and which argument is its whole tensor."""
_UNKNOWN = (
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Other methods that communicate, which no step calls."""


class Seen(NamedTuple):
    """A kind of collective over one group."""

    axis: str
    collective: str


class Amount(NamedTuple):
    """Number of calls, and the bytes handed over in all."""

    calls: int
    bytes: int


class _FakeMesh(ParallelMesh):
    """A mesh without other processes with which texts could be exchanged."""

    def share(self, text: str) -> str:
        return text

    def agree(self, error: str | None) -> str | None:
        return error

    @property
    def scalar_device(self) -> torch.device:
        """Device of the sums that the step reads: they have values on the meta device too."""
        return torch.device("cpu")


@contextmanager
def fake_world(grid: Grid, rank: int, device: str = "cpu") -> Iterator[ParallelMesh]:
    """Make the mesh of process `rank` of a job that exists only as this process."""
    on_error = sys.excepthook  # torch wraps it, once more each time
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    try:
        yield _FakeMesh(grid, device=torch.device(device), timeout_s=60.0)
    finally:
        dist.destroy_process_group()
        sys.excepthook = on_error


class Allocations(TorchDispatchMode):
    """Adds up what tensors on the meta device would take, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes alive at once; storages count with the size that they were made with."""
        self._live = 0
        self._storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def held(self) -> int:
        """Return the bytes alive now, by the present sizes of storages."""
        alive = [storage() for _, storage in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _flat(result):
            if tensor.is_meta:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        if name not in self._storages:
            self._storages[name] = size, weakref.ref(storage)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name: int) -> None:
        size, _ = self._storages.pop(name)
        self._live -= size


@contextmanager
def without_values() -> Iterator[None]:
    """Patch a step on the meta device: weights are not initialised, what is read is zero, and
    attention is of the kind that saves no scores, as on a GPU."""

    def reading(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda x: method(torch.zeros_like(x, device="cpu") if x.is_meta else x)

    def flash(
        q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, **options: Any
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout_p, is_causal)[0]

    with (
        mock.patch.object(Optimizer, "set_weights"),
        mock.patch.object(Tensor, "item", reading(Tensor.item)),
        mock.patch.object(Tensor, "tolist", reading(Tensor.tolist)),
        mock.patch.object(attention, "scaled_dot_product_attention", flash),
    ):
        yield


@contextmanager
def even_choices() -> Iterator[None]:
    """Let tokens choose experts in turn, so that each rank has as many rows for each expert: a
    process that gathers copies of its own numbers of rows learns those of the others."""

    def in_turn(scores: Tensor, k: int) -> Tensor:
        tokens, experts = scores.shape
        return (torch.arange(tokens * k, device=scores.device) % experts).view(tokens, k)

    with mock.patch.object(routers, "largest", in_turn):
        yield


class Watch:
    """Counts the collectives of this process while :meth:`counting`, by process group.

    Messages that arrive count for their sender. They are filled with zeros: the fake backend leaves
    them unwritten.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[dist.ProcessGroup, str]] = Counter()
        self.bytes: Counter[tuple[dist.ProcessGroup, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name in (*_COUNTED, *_UNKNOWN):
                method = getattr(dist.ProcessGroup, name, None)
                if method is not None:
                    patched = mock.patch.object(dist.ProcessGroup, name, self._wrap(name, method))
                    patches.enter_context(patched)
            yield

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            assert name in _COUNTED, f"{name} is not counted"
            collective, tensors = _COUNTED[name]
            key = group, collective
            if collective == "recv":
                for tensor in args[tensors]:
                    tensor.zero_()
            else:
                self.calls[key] += 1
                self.bytes[key] += sum(tensor.nbytes for tensor in _flat(args[tensors]))
            return method(group, *args, **kwargs)

        return call

    def totals(self, mesh: ParallelMesh) -> dict[Seen, Amount]:
        """Return what was seen, by the name of the axis. Messages are of axis pp, or of cp; what
        moves heads over cp is of axis ulysses."""
        result: dict[Seen, Amount] = {}
        for (group, collective), count in self.calls.items():
            ranks = tuple(dist.get_process_group_ranks(group))
            within = set(ranks) <= set(mesh.cp.ranks)
            if collective == "send":
                axis = "cp" if within else "pp"
            else:
                moves = within and collective == "all_to_all"
                of_experts = mesh.grid.ep_ranks > 1 and group == mesh.ep.group
                axis = "ep" if of_experts else "ulysses" if moves else axis_name(mesh, ranks)
            seen = Seen(axis, collective)
            calls, size = result.get(seen, Amount(0, 0))
            result[seen] = Amount(calls + count, size + self.bytes[group, collective])
        return result


def axis_name(mesh: ParallelMesh, ranks: tuple[int, ...]) -> str:
    """Return the name of a group of ranks: an axis, or the holders of a bucket as in a plan."""
    for axis in AXES:
        if getattr(mesh, axis).ranks == ranks:
            return axis
    places = [mesh.grid.coordinates_of(rank) for rank in ranks]
    indices = sorted({at.pp for at in places})
    of_experts, dense = (
        set(mesh.grid.replica_ranks(mesh.rank, indices, over_ep=experts))
        for experts in (True, False)
    )
    experts = len({at.tp for at in places}) > 1 or set(ranks) == of_experts < dense
    copies = sorted({mesh.grid.replica_index(rank, over_ep=experts) for rank in ranks})
    assert len(ranks) == len(copies) * len(indices), f"{ranks} is no group of holders"
    parts = []
    if len(copies) > 1:
        whole = "edp" if experts else "dp" if mesh.grid.cp == 1 else "dp*cp"
        near = copies[-1] - copies[0] + 1 == len(copies)
        part = f"{whole}:shard" if near else f"{whole}:replicate"
        parts.append(whole if len(copies) == mesh.grid.num_replicas(over_ep=experts) else part)
    if len(indices) > 1:
        parts.append(f"pp[{','.join(map(str, indices))}]")
    return "*".join(parts)


def _flat(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _flat(one)
