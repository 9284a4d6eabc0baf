"""The arguments with which a transformers class calls its layers, besides the hidden state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megapipe.context.positions import Positions
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.hf.attention import CausalMask
from megapipe.model.hf.outline import Outline
from megapipe.model.hf.stand_ins import Call, ReachedError, UnfitClassError, suppressed_packing


class LayerCalls:
    """Runs the part of a class before its layers for the calls of the layers.

    The same arguments hold for all micro-batches of a shape at the same positions: a class whose
    arguments depend on tokens or hidden states is refused.

    Args:
        model: the class; its buffers have values, and its parameters are not used.
        outline: its parts.
    """

    kept, kept_alone = 16, 2
    """Number of shapes and positions for which arguments are kept; and of micro-batches with
    positions of their own."""

    def __init__(self, model: nn.Module, outline: Outline) -> None:
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        core, stand_ins = outline.around(model, keep=())
        stand_ins[-1].ends = True
        self._cores = {torch.device("cpu"): core}
        self._stack = outline.stack
        self._known: dict[Any, tuple[Any, list[Call]]] = {}
        """Calls, and the positions for which they hold. Positions of one micro-batch are known by
        identity, so they must not be freed before the key."""

    def __deepcopy__(self, memo: Any) -> LayerCalls:
        return self

    def of(self, x: Tensor, mb: MicroBatch | None = None) -> list[Call]:
        """Return the call of each layer for a hidden state x [b, s, h] of a micro-batch; None:
        positions count from 0."""
        at = _at(mb, x.shape[1])
        key = (x.shape[:2], x.device, id(at) if isinstance(at, Tensor) else at)
        if key not in self._known:
            alone = isinstance(at, Tensor)
            like = [k for k, (own, _) in self._known.items() if isinstance(own, Tensor) == alone]
            if len(like) == (self.kept_alone if alone else self.kept):
                del self._known[like[0]]
            ids = torch.zeros(*x.shape[:2], dtype=torch.int64, device=x.device)
            self._known[key] = at, self._run(ids, position_ids(mb, ids))
        return self._known[key][1]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments that are kept."""
        leaves = tree_leaves([calls for _, calls in self._known.values()])
        return [each for each in leaves if isinstance(each, Tensor)]

    @torch.no_grad()
    def _run(self, ids: Tensor, positions: Tensor | None = None) -> list[Call]:
        core = self._on(ids.device)
        given = {} if positions is None else {"position_ids": positions}
        with suppressed_packing():
            try:
                core(input_ids=ids, use_cache=False, **given)
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

    def follows_positions(self, last: int) -> bool:
        """Whether arguments for some positions are those of the same positions among more, up to
        position `last`."""
        if not self._takes_positions:
            return False
        rows = torch.tensor([0, 2, 3])
        many = torch.tensor([[0, 1, 2, 5, 7, last]])
        few = many[:, rows]
        try:
            whole = self._run(torch.zeros_like(many), many)
            part = self._run(torch.zeros_like(few), few)
        except (IndexError, RuntimeError):  # a table of positions is shorter
            return False
        return all(
            _equal(_rows(a, b, rows), b)
            for a, b in zip(tree_leaves(whole), tree_leaves(part), strict=True)
        )


def _rows(whole: Any, part: Any, rows: Tensor) -> Any:
    """Return the rows of `whole` along the dimensions in which `part` is shorter."""
    if isinstance(whole, Tensor) and isinstance(part, Tensor) and whole.dim() == part.dim():
        for dim, (long, short) in enumerate(zip(whole.shape, part.shape, strict=True)):
            if long != short:
                whole = whole.index_select(dim, rows)
    return whole


def _at(mb: MicroBatch | None, length: int) -> Positions | Tensor | None:
    """Return the positions of a micro-batch's tokens, [s, b] if each sample has its own; None: they
    count from 0."""
    if mb is None:
        return None
    if mb.positions is not None:
        return mb.positions
    own = mb.positions_of(length)
    return None if own == Positions.whole(length) else own


def position_ids(mb: MicroBatch | None, ids: Tensor) -> Tensor | None:
    """Return the positions of the tokens `ids` [b, s] as transformers takes them, [b or 1, s]; None
    if they count from 0."""
    at = _at(mb, ids.shape[1])
    if at is None or isinstance(at, Tensor):
        return None if at is None else at.t()
    return torch.tensor([[*at]], device=ids.device)


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
    return a == b if isinstance(a, CausalMask) else type(a) is type(b)
