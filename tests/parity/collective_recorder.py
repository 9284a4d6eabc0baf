"""A recorder of collectives: their sizes, and whether anything was computed beside them.

A collective is *exposed* if no product of matrices is computed between its start and its wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.distributed import collectives

BEGIN = ("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_all_to_all")
"""Functions that start a collective; those that wait at once call them."""
PRODUCTS = ("mm", "addmm", "addmm_")


@dataclass
class Call:
    name: str
    elements: int
    """Elements of the whole tensor: the input of a reduction, the output of a gather."""
    exposed: bool = True
    ranks: tuple[int, ...] = field(default=(), compare=False)
    """Ranks of the group."""
    group: str = field(default="", compare=False)
    """Name of the group; several groups may have the same ranks."""
    bytes: int = field(default=0, compare=False)
    """Bytes of the whole tensor, like `elements`."""
    lengths: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Lengths sent to, and received from, each rank in an all-to-all of uneven parts."""


class Recorder(TorchDispatchMode):
    """The collectives that this process starts, in order, while it is :func:`recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._products += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))

    def exchanged(self) -> list[tuple[str, int]]:
        return [(call.name, call.elements) for call in self.calls]

    def exposed(self) -> list[str]:
        return [call.name for call in self.calls if call.exposed]

    def wrap(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `begin` for groups of several ranks; collectives that it calls itself count as its
        parts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            axis = next(arg for arg in args if isinstance(arg, collectives.Axis))
            if axis.group is None:
                return begin(*args, **kwargs)
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            made = Call(
                begin.__name__.removeprefix("start_"),
                max(tensor.numel() for tensor in tensors),
                ranks=tuple(collectives.dist.get_process_group_ranks(axis.group)),
                group=distributed_c10d._get_process_group_name(axis.group),
                bytes=max(tensor.nbytes for tensor in tensors),
                lengths=tuple(tuple(arg) for arg in args if isinstance(arg, list)),
            )
            self.calls.append(made)
            before = self._products
            result = begin(*args, **kwargs)
            values, wait = result if isinstance(result, tuple) else (None, result)

            def waited() -> None:
                made.exposed = made.exposed and self._products == before
                wait()

            return waited if values is None else (values, waited)

        return call


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record every collective, whatever module calls it."""
    recorder = Recorder()
    with ExitStack() as stack:
        for name in BEGIN:
            begin = getattr(collectives, name)
            wrapped = recorder.wrap(begin)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is begin:
                    stack.enter_context(mock.patch.object(module, name, wrapped))
        with recorder:
            yield recorder
