"""Slapo (2302.08005): a schedule of primitives transforms a plain module, which stays as written.

A :class:`ModuleSchedule` collects shard, sync, checkpoint and pipeline_split by the names of
modules. The function :func:`build` applies them to a replica of the model for one device. The
function :func:`step` runs its stages in the order of a schedule of :mod:`megapipe.schedule`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Tracer
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from examples.sharding.threads import Devices, SumBackward, SumForward
from megapipe.errors import ConfigError
from megapipe.schedule.ir import Kind, Schedule


class ModuleSchedule:
    """Primitives for a model.

    Raises:
        ConfigError: a name that the model does not have, or a dimension that cannot be split.
    """

    def __init__(self, model: nn.Module, devices: int) -> None:
        self.model, self.devices = model, devices
        self.shards: dict[str, int] = {}
        """Dimension by name of a parameter."""
        self.partial_biases: set[str] = set()
        """Biases that only the first device adds."""
        self.syncs: list[tuple[str, str]] = []
        """Name of a module, and forward or backward."""
        self.checkpoints: list[str] = []
        self.cuts: list[str] = []

    def shard(self, module: str, parameter: str, dim: int) -> None:
        """Split a parameter over the devices. If that splits the sum of a linear layer, its output
        is partial, and only the first device adds the bias."""
        name = f"{module}.{parameter}"
        known = dict(self.model.named_parameters())
        if name not in known:
            raise ConfigError(f"shard: the model has no parameter {name!r}")
        if not 0 <= dim < known[name].dim() or known[name].shape[dim] % self.devices:
            raise ConfigError(
                f"shard: {name} of shape {tuple(known[name].shape)} has no {self.devices} equal "
                f"parts along dimension {dim}"
            )
        self.shards[name] = dim
        owner = self._module("shard", module)
        if isinstance(owner, nn.Linear) and (parameter, dim) == ("weight", 1):
            self.partial_biases.add(f"{module}.bias")

    def sync(self, module: str, when: str) -> None:
        """Sum over the devices the output of a module (forward), or the gradient of its input
        (backward)."""
        self._module("sync", module)
        if when not in ("forward", "backward"):
            raise ConfigError(f"sync: {module}: {when!r} is neither forward nor backward")
        self.syncs.append((module, when))

    def checkpoint(self, module: str) -> None:
        """Recompute a module in the backward."""
        self._module("checkpoint", module)
        self.checkpoints.append(module)

    def pipeline_split(self, module: str) -> None:
        """End a pipeline stage after a module."""
        self._module("pipeline_split", module)
        self.cuts.append(module)

    def _module(self, primitive: str, name: str) -> nn.Module:
        modules = dict(self.model.named_modules())
        if name not in modules:
            raise ConfigError(f"{primitive}: the model has no module {name!r}")
        return modules[name]


class Replica(NamedTuple):
    """A transformed replica of the model on one device."""

    model: nn.Module
    """The model, with the names of its parameters."""
    stages: list[nn.Module]
    """Pipeline stages, which have the model's modules."""


def build(schedule: ModuleSchedule, devices: Devices, device: int) -> Replica:
    """Apply a schedule to a replica of its model for one device."""
    model = copy.deepcopy(schedule.model)
    for name, dim in schedule.shards.items():
        owner, _, parameter = name.rpartition(".")
        shard = model.get_parameter(name).detach().chunk(devices.count, dim)[device].clone()
        setattr(model.get_submodule(owner), parameter, nn.Parameter(shard))
    for name in schedule.partial_biases:
        owner, _, _ = name.rpartition(".")
        bias = getattr(model.get_submodule(owner), "bias", None)
        if bias is not None and device > 0:
            bias.requires_grad_(False).zero_()
    for name, when in schedule.syncs:
        module = model.get_submodule(name)
        if when == "forward":
            module.register_forward_hook(partial(_sum_output, devices, device))
        else:
            module.register_forward_pre_hook(partial(_sum_input_grad, devices, device))
    for name in schedule.checkpoints:
        recomputed: Any = model.get_submodule(name)
        recomputed.forward = partial(checkpoint, recomputed.forward, use_reentrant=False)
    return Replica(model, _stages(model, schedule.cuts) if schedule.cuts else [model])


def _sum_output(devices: Devices, device: int, module: nn.Module, args: Any, out: Tensor) -> Any:
    return SumForward.apply(devices, device, out)


def _sum_input_grad(devices: Devices, device: int, module: nn.Module, args: Any) -> Any:
    return (SumBackward.apply(devices, device, args[0]), *args[1:])


class _Tracer(Tracer):
    """Tracer that does not look into modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _stages(model: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
    """Cut the forward of a model, as its own code calls its modules."""
    graph = _Tracer().trace(model)
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    for cut in cuts:
        if cut not in called:
            raise ConfigError(f"pipeline_split: the model's forward does not itself call {cut!r}")
    stage_of: dict[Node, int] = {}
    stage = 0
    for node in graph.nodes:
        stage_of[node] = stage
        stage += node.op == "call_module" and node.target in cuts
    whole = split_module(GraphModule(model, graph), model, lambda node: stage_of[node])
    stages = [module for _, module in whole.named_children()]
    for index, each in enumerate(stages):
        assert isinstance(each, GraphModule)
        inputs = sum(node.op == "placeholder" for node in each.graph.nodes)
        if inputs != 1:
            raise ConfigError(f"pipeline_split: stage {index} takes {inputs} values, not one")
    return stages


def step(
    stages: Sequence[nn.Module],
    order: Schedule,
    microbatches: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Run stages on micro-batches in the order of a schedule; return the sum of the losses.

    `loss`: function of the last output and the index of the micro-batch. All pipeline ranks run in
    this thread: each next operation is the first one of a rank that has its input.
    """
    last = order.placement.stages - 1
    inputs: dict[tuple[int, int], Tensor] = {(0, i): x for i, x in enumerate(microbatches)}
    outputs: dict[tuple[int, int], Tensor] = {}
    grads: dict[tuple[int, int], Tensor | None] = {}
    total = torch.zeros((), dtype=torch.float64)
    lists = [order.rank_ops(rank) for rank in range(order.placement.ranks)]
    while any(lists):
        ready = (
            ops
            for ops in lists
            if ops
            and ((ops[0].stage, ops[0].microbatch) in (inputs if ops[0].kind == Kind.F else grads))
        )
        kind, stage, microbatch, *_ = next(ready).pop(0)
        at = stage, microbatch
        if kind == Kind.F:
            outputs[at] = stages[stage](inputs[at])
            if stage < last:
                inputs[stage + 1, microbatch] = outputs[at].detach().requires_grad_()
            else:
                outputs[at] = loss(outputs[at], microbatch)
                total += outputs[at].detach()
                grads[at] = None
        else:
            outputs.pop(at).backward(grads.pop(at))
            if stage:
                grads[stage - 1, microbatch] = inputs.pop(at).grad
    return total


def whole_grads(schedule: ModuleSchedule, replicas: Sequence[Replica]) -> Mapping[str, Tensor]:
    """Return the gradients of the plain model's parameters from those of all devices."""
    found = {}
    for name, _ in schedule.model.named_parameters():
        grads = [own.model.get_parameter(name).grad for own in replicas]
        pieces = [grad for grad in grads if grad is not None]
        dim = schedule.shards.get(name)
        found[name] = pieces[0] if dim is None else torch.cat(pieces, dim)
    return found


def shard_block(schedule: ModuleSchedule, block: str) -> None:
    """Split a :class:`~examples.sharding.models.Block` by columns, then rows (1909.08053)."""
    wide = (*(f"{block}.attention.{each}" for each in "qkv"), f"{block}.mlp.up")
    for name in wide:
        schedule.shard(name, "weight", 0)
        schedule.shard(name, "bias", 0)
    for part, narrow in (("attention", "out"), ("mlp", "down")):
        schedule.shard(f"{block}.{part}.{narrow}", "weight", 1)
        schedule.sync(f"{block}.{part}", "backward")
        schedule.sync(f"{block}.{part}.{narrow}", "forward")
