"""Modules that take the place of others while a transformers class runs its own forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import masking_utils

HIDDEN = "hidden_states"
"""Name by which a class passes the hidden state to a layer, if it is not the first argument."""


class UnfitClassError(Exception):
    """A reason why a class cannot be cut into layers."""


class ReachedError(Exception):
    """Ends a forward at the layer that was to be reached."""


class Call(NamedTuple):
    """The arguments of a call of a layer, but for the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
        """Return the hidden state of a call and its other arguments."""
        if args:
            return args[0], cls(args[1:], kwargs)
        others = {name: value for name, value in kwargs.items() if name != HIDDEN}
        return kwargs[HIDDEN], cls((), others)


class LayerStandIn(nn.Module):
    """Takes the place of a layer: notes its call and passes the hidden state on.

    Attributes that the class reads from a layer, such as its attention type, are the layer's.

    Args:
        layer: the layer.
        form: length of the tuple that the layer returns; 0: it returns a tensor.
    """

    def __init__(self, layer: nn.Module, form: int = 0) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a child: its parameters are not this module's
        self.form = form
        self.hidden: Tensor | None = None
        """The hidden state of the last call."""
        self.call: Call | None = None
        """The other arguments of the last call."""
        self.given: Tensor | None = None
        """Hidden state to return in place of the one that is passed; None: pass that one on."""
        self.ends = False
        """Whether the forward ends here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.hidden, self.call = Call.split(args, kwargs)
        if self.ends:
            raise ReachedError
        y = self.hidden if self.given is None else self.given
        return (y, *[None] * (self.form - 1)) if self.form else y

    def __deepcopy__(self, memo: Any) -> LayerStandIn:
        """Return a stand-in of the same layer: the layer is not copied."""
        new = LayerStandIn(self.__dict__["layer"], self.form)
        new.ends = self.ends
        return new

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Zeros(nn.Module):
    """Takes the place of an embedding or a linear layer: returns zeros [..., width].

    `reads_ids`: whether the input is token ids [...]; otherwise it is [..., k].
    """

    def __init__(self, width: int, dtype: torch.dtype, *, reads_ids: bool) -> None:
        super().__init__()
        self.width, self.dtype, self.reads_ids = width, dtype, reads_ids
        self.weight = torch.empty(0, dtype=dtype, device="cpu")  # classes read its type

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = x.shape if self.reads_ids else x.shape[:-1]
        return torch.zeros(*rows, self.width, dtype=self.dtype, device=x.device)


class Same(nn.Module):
    """Takes the place of a module whose output is not used: returns its first argument."""

    def forward(self, x: Any = None, *_: Any, **__: Any) -> Any:
        return x


def neutral(module: nn.Module) -> nn.Module:
    """Return a module without parameters whose outputs have the same shapes and types."""
    if isinstance(module, nn.Embedding):
        return Zeros(module.embedding_dim, module.weight.dtype, reads_ids=True)
    if isinstance(module, nn.Linear):
        return Zeros(module.out_features, module.weight.dtype, reads_ids=False)
    return Same()


def replaced(module: nn.Module, instead: Mapping[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of `module` with other modules at the paths of `instead`. Modules on
    the way to a path are copied too; all others, and all tensors, are shared."""
    if "" in instead:
        return instead[""]
    below: dict[str, dict[str, nn.Module]] = {}
    for path, other in instead.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = other
    new = copy.copy(module)
    new.__dict__["_modules"] = {
        name: replaced(child, below[name]) if name in below and child is not None else child
        for name, child in module._modules.items()
    }
    return new


@contextmanager
def suppressed_packing() -> Iterator[None]:
    """Within the context, transformers does not look for packed documents in positions, which asks
    for values: documents are given by the run."""
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
        yield
