"""Where the layers of a transformers class are, and which modules belong to its two ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.model.hf.attention import AttentionCall, attending
from megapipe.model.hf.stand_ins import (
    Call,
    LayerStandIn,
    UnfitClassError,
    neutral,
    replaced,
    suppressed_packing,
)
from megapipe.model.kernel_needs import AttentionNeeds
from megapipe.model.modules.tp_dataflow import draws


@dataclass(frozen=True)
class Outline:
    """The parts of a class: its stack of layers, what runs before it and what runs after it."""

    stack: str
    """Path of the list of layers."""
    forms: tuple[int, ...]
    """For each layer the length of the tuple that it returns; 0: it returns a tensor."""
    before: frozenset[str]
    """Paths of modules with parameters on which the input of the first layer depends."""
    after: frozenset[str]
    """Paths of modules with parameters that use the output of the last layer."""
    unused: frozenset[str]
    """Paths of modules with parameters on which no output depends."""
    attention: tuple[AttentionNeeds | None, ...]
    """For each layer the sizes of its attention; None if megapipe's kernels do not compute it, or
    if the layer passes values between positions in another way too."""
    draws: bool = False
    """Whether a forward in training draws random numbers, as dropout does."""
    own_attention: str = ""
    """Reason why megapipe's kernels do not compute its attention, if it is known."""

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of a class in their order."""
        return _layers(model, self.stack)

    def around(
        self, model: nn.Module, keep: Collection[str]
    ) -> tuple[nn.Module, list[LayerStandIn]]:
        """Return a copy of the class without its layers and without other modules with parameters
        than those at the paths `keep`, and the stand-ins of the layers."""
        pairs = zip(self.layers(model), self.forms, strict=True)
        stand_ins = [LayerStandIn(layer, form) for layer, form in pairs]
        neutrals = {
            path: neutral(model.get_submodule(path))
            for path in (self.before | self.after | self.unused) - {*keep}
            if path and not any(f"{each}.".startswith(f"{path}.") for each in (self.stack, *keep))
        }
        return replaced(model, {**neutrals, self.stack: nn.ModuleList(stand_ins)}), stand_ins


def outline_of(model: Any) -> Outline:
    """Find the parts of a class by running it once on the meta device.

    `model`: all of the class, on the meta device.

    Raises:
        UnfitClassError: it has no stack of layers, or its layers do not fit into a pipeline.
    """
    stack = _find_stack(model)
    layers = _layers(model, stack)
    passed = _Passed(len(layers))
    trials = [_Trial(layer, number, passed) for number, layer in enumerate(layers)]
    whole = replaced(model, {stack: nn.ModuleList(trials)})
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    with suppressed_packing(), _Draws() as random:
        logits = whole(input_ids=ids, use_cache=False).logits
    if passed.order != [*range(len(layers))]:
        raise UnfitClassError(f"it calls its layers in the order {passed.order}")
    outer = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{stack}.")
    }
    assert passed.first is not None
    assert passed.last is not None
    if passed.first.shape[:2] != ids.shape:
        raise UnfitClassError(
            f"its layers get hidden states of shape {tuple(passed.first.shape)} for tokens of "
            f"shape {tuple(ids.shape)}"
        )
    before = _depends(passed.first, outer)
    after = _depends(logits, {**outer, "": passed.last})
    if "" not in after:
        raise UnfitClassError("its logits do not depend on its last layer")
    return Outline(
        stack=stack,
        forms=tuple(each.form for each in trials),
        before=_owners(before),
        after=_owners(after - {""}),
        unused=_owners(outer.keys() - before - after),
        attention=tuple(each.attention for each in trials),
        draws=random.found,
    )


def _layers(model: nn.Module, stack: str) -> list[nn.Module]:
    found = model.get_submodule(stack)
    assert isinstance(found, nn.ModuleList)
    return list(found)


def _owners(names: Collection[str]) -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in names)


def _find_stack(model: Any) -> str:
    """Return the path of the list of layers."""
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    outer = [path for path in found if not any(path.startswith(f"{each}.") for each in found)]
    if len(outer) != 1:
        which = f"it has {', '.join(outer)}" if outer else "it has none"
        raise UnfitClassError(f"expected one list of {number} layers, and {which}")
    return outer[0]


def _depends(y: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters on which `y` depends."""
    if not y.requires_grad:
        return set()
    grads = torch.autograd.grad(
        y.sum(), list(parameters.values()), allow_unused=True, retain_graph=True
    )
    return {name for name, grad in zip(parameters, grads, strict=True) if grad is not None}


class _Draws(TorchDispatchMode):
    """Mode that notes whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found |= draws(func)
        return func(*args, **(kwargs or {}))


class _Passed:
    """Record of the tensors that have passed between the layers of a model."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.order: list[int] = []
        """Numbers of the layers in the order of their calls."""
        self.first: Tensor | None = None
        """Input of the first layer, with its graph."""
        self.last: Tensor | None = None
        """Output of the last layer, a leaf."""
        self.made: dict[int, tuple[int, Tensor]] = {}
        """Every tensor that a layer has returned, by identity, with the number of the layer."""


class _Trial(nn.Module):
    """Runs a layer as the class calls it, and looks at what goes in and what comes out."""

    def __init__(self, layer: nn.Module, number: int, passed: _Passed) -> None:
        super().__init__()
        self.__dict__["layer"] = layer
        self.number, self.passed = number, passed
        self.form = 0
        self.attention: AttentionNeeds | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passed = self.passed
        hidden, call = Call.split(args, kwargs)
        if not passed.order:
            passed.first = hidden
        passed.order.append(self.number)
        self._check_arguments(call)
        before = _sizes(call)
        attended: list[AttentionCall] = []
        with attending(lambda asked: _noted(asked, attended)):
            y = self.__dict__["layer"](*args, **kwargs)
        self.attention = _attention(self.__dict__["layer"], attended)
        if _sizes(call) != before:
            raise UnfitClassError(f"layer {self.number} writes to what it is called with")
        self.form = len(y) if isinstance(y, tuple) else 0
        x = y[0] if self.form else y
        if not isinstance(x, Tensor) or x.shape != hidden.shape:
            raise UnfitClassError(f"layer {self.number} returns {_described(y)}")
        passed.made |= {id(each): (self.number, each) for each in tree_leaves(y)}
        if self.number == passed.layers - 1:
            passed.last = x = x.detach().requires_grad_()
        return (x, *y[1:]) if self.form else x

    def _check_arguments(self, call: Call) -> None:
        for each in tree_leaves(call):
            if not isinstance(each, Tensor):
                continue
            if each.requires_grad:
                raise UnfitClassError(
                    f"layer {self.number} is called with a tensor that depends on weights, beside "
                    "the hidden state"
                )
            if id(each) in self.passed.made:
                number, _ = self.passed.made[id(each)]
                raise UnfitClassError(
                    f"layer {self.number} is called with a tensor that layer {number} returned "
                    "beside the hidden state"
                )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


def _noted(call: AttentionCall, calls: list[AttentionCall]) -> Tensor:
    calls.append(call)
    return call.explicit()


def _attention(layer: nn.Module, calls: Sequence[AttentionCall]) -> AttentionNeeds | None:
    """Return the sizes of a layer's attention, if nothing else passes values between positions."""
    convolves = any(isinstance(each, nn.Conv1d) for each in layer.modules())
    if len(calls) != 1 or calls[0].mask is not None or convolves:
        return None
    (call,) = calls
    width = max(call.q.shape[-1], call.v.shape[-1])
    return AttentionNeeds(call.q.shape[1], call.k.shape[1], width, call.dropout, call.scores)


def _sizes(call: Call) -> list[int]:
    """Return the sizes of the containers among a layer's arguments."""
    return [
        len(each) for each in (*call.args, *call.kwargs.values()) if isinstance(each, (dict, list))
    ]


def _described(y: Any) -> str:
    if isinstance(y, Tensor):
        return f"a tensor of shape {tuple(y.shape)}"
    return f"a {type(y).__name__}"
