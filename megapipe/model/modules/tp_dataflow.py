"""Traces a layer's forward on the meta device, to refuse layers that tp would silently break.

Between a :class:`ColumnLinear` and the :class:`RowLinear` after it each tensor-parallel rank has a
*shard* of the values. A parameter used between the two would get only a part of its gradient on
each rank, and random numbers would be equal in every shard. Also refused is a second use of a
weight whose gradient is deferred to ``W``: the gradient would lack that use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.layers.user_linear import ColumnLinear, Linear, RowLinear
from megapipe.model.modules.fused_attention import FUSED


@contextmanager
def one_rank(modules: Iterable[Linear], tp: int) -> Iterator[None]:
    """Give column- and row-parallel layers the weights of one of `tp` ranks, within the context."""
    whole = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    try:
        for module, name, parameter in whole:
            dim = module.spec("", name).split_dim
            if dim is not None:
                share = parameter.detach().narrow(dim, 0, parameter.shape[dim] // tp).clone()
                module._parameters[name] = Parameter(share, parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in whole:
            module._parameters[name] = parameter


class ShardDataflowCheck(TorchDispatchMode):
    """Mode that checks a forward of `layer` on one of `tp` ranks; `problem` is the first error.

    `deferred`: linear layers of `layer` with deferred weight gradients. `partial`: parameters whose
    gradients are summed over tp, which may be used between split layers.
    """

    def __init__(
        self,
        layer: nn.Module,
        deferred: Collection[Linear],
        partial: Collection[Parameter],
        tp: int,
    ) -> None:
        super().__init__()
        self.problem: str | None = None
        self._tp = tp
        self._partial: dict[Any, Tensor] = {storage(each): each for each in partial}
        """Parameters whose gradients are summed over tp, and tensors computed only from them, by
        storage."""
        self._names = {storage(p): name for name, p in layer.named_parameters()}
        self._waiting = {storage(p) for module in deferred for p in module.parameters()}
        self._paths = {module: path for path, module in layer.named_modules()}
        self._shares: dict[Any, Tensor] = {}
        """Sharded tensors by storage; kept alive so that no other storage gets the identity."""
        self._drawn: dict[Any, Tensor] = {}
        """Random numbers and tensors computed only from random numbers, by storage."""
        self._inside: Linear | None = None

    def enter(self, module: Linear) -> None:
        """Record that the forward of a linear layer begins."""
        self._inside = module

    def leave(self, module: Linear, x: Tensor, y: Tensor) -> None:
        """Record that the forward of a linear layer ends; check its input `x` and output `y`."""
        self._inside = None
        if self._tp == 1:
            return
        name = f"{type(module).__name__} {self._paths[module]}".rstrip()
        if not isinstance(module, RowLinear):
            if self._is_share(x):
                self._found(f"{name} gets the shard of a ColumnLinear: expected a RowLinear")
        elif not self._is_share(x):
            self._found(f"{name} gets no shard: expected a ColumnLinear before it")
        if isinstance(module, ColumnLinear):
            self._shares[storage(y)] = y

    def end(self, outputs: Iterable[Tensor]) -> None:
        """Check that the layer returns no shard of a value."""
        if any(map(self._is_share, outputs)):
            self._found("it returns the shard of a ColumnLinear: expected a RowLinear after that")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        of_share = self._inside is None and any(map(self._is_share, tensors))
        if self._inside is None and not func.is_view and torch.is_grad_enabled():
            self._check(func, tensors, of_share)
        y = func(*args, **(kwargs or {}))
        made = {storage(each): each for each in tree_leaves(y) if isinstance(each, Tensor)}
        if of_share:
            self._shares.update(made)
        elif self._only_partial(tensors):
            self._partial.update(made)
        elif draws(func) or (tensors and all(map(self._is_drawn, tensors))):
            self._drawn.update(made)
        return y

    def _check(self, func: Any, tensors: Sequence[Tensor], of_share: bool) -> None:
        for each in map(storage, tensors):
            if each in self._waiting:
                self._found(
                    f"{self._names[each]} is used outside of its layer, but its gradient is "
                    "deferred to W: expected nn.Linear in its place"
                )
            elif of_share and each in self._names and each not in self._partial:
                self._found(
                    f"{self._names[each]} is used between a ColumnLinear and a RowLinear, "
                    f"where each of parallel.tp={self._tp} ranks would have only a part of "
                    "its gradient: move it out of that range"
                )
        if of_share and any(map(self._needs_sum, tensors)):
            self._found(
                f"a value that all of parallel.tp={self._tp} ranks have is used between a "
                "ColumnLinear and a RowLinear, where each would have only a part of its gradient: "
                "expected it to pass a ColumnLinear first"
            )
        widths = [each.shape[-1:] for each in tensors if self._is_share(each)]
        drawn = [each.shape[-1:] for each in tensors if self._is_drawn(each)]
        if of_share and (draws(func) or any(one in widths and one != (1,) for one in drawn)):
            self._found(
                f"random numbers ({func.overloadpacket.__name__}) between a ColumnLinear and a "
                f"RowLinear would be the same on each of parallel.tp={self._tp} ranks: expected "
                "dropout after the RowLinear"
            )

    def _needs_sum(self, tensor: Tensor) -> bool:
        """Whether a tensor has a gradient to which each rank would add a part."""
        known = storage(tensor) in self._names or storage(tensor) in self._partial
        return tensor.requires_grad and not known and not self._is_share(tensor)

    def _only_partial(self, tensors: Sequence[Tensor]) -> bool:
        """Whether of some tensors those with gradients depend only on parameters whose gradients
        are summed over tp."""
        with_grad = [each for each in tensors if each.requires_grad]
        return bool(with_grad) and all(storage(each) in self._partial for each in with_grad)

    def _is_share(self, tensor: Tensor) -> bool:
        return storage(tensor) in self._shares

    def _is_drawn(self, tensor: Tensor) -> bool:
        return storage(tensor) in self._drawn

    def _found(self, problem: str) -> None:
        self.problem = self.problem or problem


def draws(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket is not FUSED


def storage(tensor: Tensor) -> Any:
    """Return the identity of a tensor's storage; tensors on the meta device have one too."""
    return tensor.untyped_storage()._cdata
