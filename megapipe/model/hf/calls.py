"""The arguments with which a transformers class calls its layers, besides the hidden state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megapipe.model.hf.outline import Outline, UnfitClassError
from megapipe.model.hf.stand_ins import Call, ReachedError, suppressed_packing


class LayerCalls:
    """Runs the part of a class before its layers for the calls of the layers.

    The same arguments hold for all micro-batches of a shape: a class whose arguments depend on
    tokens or hidden states is refused.

    Args:
        model: the class; its buffers have values, and its parameters are not used.
        outline: its parts.
    """

    kept = 4
    """Number of shapes for which arguments are kept."""

    def __init__(self, model: nn.Module, outline: Outline) -> None:
        core, stand_ins = outline.around(model, keep=())
        stand_ins[-1].ends = True
        self._cores = {torch.device("cpu"): core}
        self._stack = outline.stack
        self._known: dict[Any, list[Call]] = {}

    def __deepcopy__(self, memo: Any) -> LayerCalls:
        return self

    def of(self, x: Tensor) -> list[Call]:
        """Return the call of each layer for a hidden state x [b, s, h]."""
        key = (x.shape[:2], x.device)
        if key not in self._known:
            if len(self._known) == self.kept:
                del self._known[next(iter(self._known))]
            ids = torch.zeros(*x.shape[:2], dtype=torch.int64, device=x.device)
            self._known[key] = self._run(ids)
        return self._known[key]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments that are kept."""
        leaves = tree_leaves(list(self._known.values()))
        return [each for each in leaves if isinstance(each, Tensor)]

    @torch.no_grad()
    def _run(self, ids: Tensor) -> list[Call]:
        core = self._on(ids.device)
        with suppressed_packing():
            try:
                core(input_ids=ids, use_cache=False)
            except ReachedError:
                stand_ins: Any = core.get_submodule(self._stack)
                return [each.call for each in stand_ins]
        raise AssertionError("a forward passed its last layer")

    def _on(self, device: torch.device) -> nn.Module:
        """Return the class on a device."""
        if device not in self._cores:
            self._cores[device] = copy.deepcopy(self._cores[torch.device("cpu")]).to(device)
        return self._cores[device]

    def check(self, vocabulary: int) -> None:
        """Refuse a class whose layers are called with what depends on the tokens.

        Raises:
            UnfitClassError: it is one.
        """
        some = self._run(torch.zeros(2, 6, dtype=torch.int64))
        generator = torch.Generator().manual_seed(0)
        others = self._run(torch.randint(vocabulary, (2, 6), generator=generator))
        for number, (one, other) in enumerate(zip(some, others, strict=True)):
            for name in _differing(one, other):
                raise UnfitClassError(
                    f"layer {number} is called with {name}, which depends on the tokens"
                )


def _differing(one: Call, other: Call) -> Iterable[str]:
    """Yield the arguments that differ between two calls, by name or position."""
    for number, (a, b) in enumerate(zip(one.args, other.args, strict=True), start=2):
        if not _equal(a, b):
            yield f"argument {number}"
    for name, a in one.kwargs.items():
        if not _equal(a, other.kwargs[name]):
            yield name


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(each, b[key]) for key, each in a.items())
    return type(a) is type(b)
