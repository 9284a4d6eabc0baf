"""Recording of a block: forward, loss and all gradients, as one program of aten operations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from examples.sharding.placement import Shape
from examples.sharding.program import Op, Program, Ref
from megapipe.errors import ConfigError

_NOTHING = ("detach", "alias")
"""Operations that return their input."""


def record(module: nn.Module, shape: Shape, *, backward: bool = True) -> Program:
    """Run a module of one input of `shape` and one output; return what it computes.

    Inputs of the program are ``x``, ``target`` and the parameters by their names. The loss is the
    sum of output times target, so that the gradient of the output is the target. With `backward`
    the outputs are ``loss`` and the gradients, without it ``y``.
    """
    parameters = {
        name: torch.empty(each.shape, dtype=torch.float64, requires_grad=True)
        for name, each in module.named_parameters()
    }

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: inputs[name] for name in parameters}
        y = functional_call(module, weights, (inputs["x"],))
        if not backward:
            return {"y": y}
        wanted = ("x", *parameters)
        grads = torch.autograd.grad(y, [inputs[name] for name in wanted], inputs["target"])
        named = {f"{name}.grad": grad for name, grad in zip(wanted, grads, strict=True)}
        return {"loss": (y * inputs["target"]).sum(), **named}

    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    given = {"x": x, **parameters}
    if backward:
        given["target"] = torch.zeros_like(functional_call(module, parameters, (x,)))
    return record_function(call, given, frozenset(parameters))


def record_function(
    call: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    given: dict[str, Tensor],
    parameters: frozenset[str] = frozenset(),
) -> Program:
    """Run a function of named tensors that returns named tensors; return what it computes."""
    results: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        made = call(dict(zip(given, tensors, strict=True)))
        results.extend(made)
        return list(made.values())

    graph = make_fx(flat)(*given.values()).graph
    graph.eliminate_dead_code()
    names, shapes, ops = _read(graph, tuple(given))
    last = next(iter(reversed(graph.nodes)))
    outputs = {each: names[node] for each, node in zip(results, last.args[0], strict=True)}
    return Program(shapes, tuple(given), parameters, tuple(ops), outputs)


def _read(
    graph: Graph, inputs: tuple[str, ...]
) -> tuple[dict[Node, str], dict[str, Shape], list[Op]]:
    """Return names of nodes, shapes of values, and the operations of a graph."""
    nodes = list(graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    names: dict[Node, str] = dict(zip(places, inputs, strict=True))
    shapes = {names[node]: tuple(node.meta["val"].shape) for node in places}
    ops: list[Op] = []
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        kind = node.target.overloadpacket.__name__
        if kind in _NOTHING:
            names[node] = names[node.args[0]]
            continue
        ops.append(_op(node, kind, names, shapes))
    return names, shapes, ops


def _op(node: Node, kind: str, names: dict[Node, str], shapes: dict[str, Shape]) -> Op:
    """Name the results of a node in `names` and `shapes`; return its operation."""
    if any(isinstance(arg, Node) for arg in node.kwargs.values()):
        raise ConfigError(f"record: {kind} has a tensor as a keyword argument; pass it by position")
    made = node.meta["val"]
    if isinstance(made, Tensor):
        names[node] = node.name
        outputs: tuple[str, ...] = (node.name,)
        shapes[node.name] = tuple(made.shape)
    else:
        picked = {user.args[1]: user for user in node.users}
        assert all(user.target is operator.getitem for user in node.users)
        outputs = tuple(f"{node.name}.{index}" for index in range(len(made)))
        for index, value in enumerate(made):
            shapes[outputs[index]] = tuple(value.shape)
            if index in picked:
                names[picked[index]] = outputs[index]

    def referred(arg: Any) -> Any:
        return Ref(names[arg]) if isinstance(arg, Node) else arg

    args = tuple(
        tree_map(referred, list(arg)) if isinstance(arg, list) else referred(arg)
        for arg in node.args
    )
    inputs = tuple(arg.value for arg in args if isinstance(arg, Ref))
    return Op(kind, node.target, args, dict(node.kwargs), inputs, outputs)
