"""Follows a layer's forward on the meta device, to refuse what would give wrong results silently.

Between a :class:`ColumnLinear` and the :class:`RowLinear` after it each tensor-parallel rank works
on its *share* of the values. A parameter used there would get a part of its gradient on each rank,
and random numbers would be alike in every share. A weight whose gradient waits for ``W`` has none
from any other use.
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

from megapipe.layers.own import ColumnLinear, Linear, RowLinear
from megapipe.model.modules.fused_attention import FUSED


@contextmanager
def one_rank(modules: Iterable[Linear], tp: int) -> Iterator[None]:
    """Within the context, column and row layers have the weights of one of `tp` ranks."""
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
                module._parameters[name] = Parameter(share)
        yield
    finally:
        for module, name, parameter in whole:
            module._parameters[name] = parameter


class ShardDataflowCheck(TorchDispatchMode):
    """Says in `problem` what is wrong with a forward of `layer` on one of `tp` ranks.

    `deferred` are its linear layers whose weight gradients wait.
    """

    def __init__(self, layer: nn.Module, deferred: Collection[Linear], tp: int) -> None:
        super().__init__()
        self.problem: str | None = None
        self._tp = tp
        self._names = {storage(p): name for name, p in layer.named_parameters()}
        self._waiting = {storage(p) for module in deferred for p in module.parameters()}
        self._paths = {module: path for path, module in layer.named_modules()}
        self._shares: dict[Any, Tensor] = {}
        """By storage; held, so that nothing else takes its place."""
        self._drawn: dict[Any, Tensor] = {}
        """Random numbers, and what is made of them alone."""
        self._inside: Linear | None = None

    def enter(self, module: Linear) -> None:
        """The forward of a linear layer begins."""
        self._inside = module

    def leave(self, module: Linear, x: Tensor, y: Tensor) -> None:
        """The forward of a linear layer ends: `x` -> `y`."""
        self._inside = None
        if self._tp == 1:
            return
        name = f"{type(module).__name__} {self._paths[module]}".rstrip()
        if not isinstance(module, RowLinear):
            if self._is_share(x):
                self._found(f"{name} takes the share of a ColumnLinear: expected a RowLinear")
        elif not self._is_share(x):
            self._found(f"{name} takes no share: expected a ColumnLinear before it")
        if isinstance(module, ColumnLinear):
            self._shares[storage(y)] = y

    def end(self, outputs: Iterable[Tensor]) -> None:
        """The layer returns `outputs`."""
        if any(map(self._is_share, outputs)):
            self._found("it returns the share of a ColumnLinear: expected a RowLinear after that")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        of_share = self._inside is None and any(map(self._is_share, given))
        if self._inside is None and not func.is_view and torch.is_grad_enabled():
            self._check(func, given, of_share)
        y = func(*args, **(kwargs or {}))
        made = {storage(each): each for each in tree_leaves(y) if isinstance(each, Tensor)}
        if of_share:
            self._shares.update(made)
        elif _draws(func) or (given and all(map(self._is_drawn, given))):
            self._drawn.update(made)
        return y

    def _check(self, func: Any, given: Sequence[Tensor], of_share: bool) -> None:
        for each in map(storage, given):
            if each in self._waiting:
                self._found(
                    f"{self._names[each]} is used outside of its layer, and its gradient waits "
                    "for W: expected nn.Linear there"
                )
            elif of_share and each in self._names:
                self._found(
                    f"{self._names[each]} is used between a ColumnLinear and a RowLinear, where "
                    f"each of parallel.tp={self._tp} ranks would have a part of its gradient: "
                    "expected no parameters there"
                )
        widths = [each.shape[-1:] for each in given if self._is_share(each)]
        drawn = [each.shape[-1:] for each in given if self._is_drawn(each)]
        if of_share and (_draws(func) or any(one in widths and one != (1,) for one in drawn)):
            self._found(
                f"random numbers ({func.overloadpacket.__name__}) between a ColumnLinear and a "
                f"RowLinear would be the same on each of parallel.tp={self._tp} ranks: expected "
                "dropout after the RowLinear"
            )

    def _is_share(self, tensor: Tensor) -> bool:
        return storage(tensor) in self._shares

    def _is_drawn(self, tensor: Tensor) -> bool:
        return storage(tensor) in self._drawn

    def _found(self, problem: str) -> None:
        self.problem = self.problem or problem


def _draws(func: Any) -> bool:
    """Whether an operation takes random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket is not FUSED


def storage(tensor: Tensor) -> Any:
    """The identity of a tensor's storage, which tensors on the meta device have too."""
    return tensor.untyped_storage()._cdata
