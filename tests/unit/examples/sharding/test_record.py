"""Recorded programs compute what the module does, and what the package's own layers compute."""

from __future__ import annotations

from collections import Counter

import torch
from torch.func import functional_call

from examples.sharding.models import Block
from examples.sharding.program import Program
from examples.sharding.record import record
from megapipe.plan.run import measure
from megapipe.plan.unit import Kernel, Unit
from tests.parity.cases import Case, configure


def test_a_program_computes_loss_and_gradients_of_the_module(block: Program) -> None:
    tensors = {name: each.requires_grad_() for name, each in block.random_inputs().items()}
    weights = {name: tensors[name] for name in block.parameters}
    loss = (functional_call(Block(8, 4), weights, (tensors["x"],)) * tensors["target"]).sum()
    values = block.run({name: each.detach() for name, each in tensors.items()})
    assert torch.allclose(values[block.outputs["loss"]], loss)
    names = ["x", *sorted(block.parameters)]
    grads = torch.autograd.grad(loss, [tensors[name] for name in names])
    for name, grad in zip(names, grads, strict=True):
        assert torch.allclose(values[block.outputs[f"{name}.grad"]], grad, atol=1e-12), name


def flops(unit: Unit, operation: str) -> int:
    calls = unit.operations[operation]  # type: ignore[index]
    return sum(each.flops for each in calls if isinstance(each, Kernel) and "mm" in each.name)


def test_the_products_are_those_of_the_layers_of_the_package() -> None:
    """The package has queries, keys and values in one product; there are as many FLOPs, and the
    same kernel of attention."""
    case = Case(pp=4, in_process=True, layers=4, dtype="fp32", sequence=64)
    config, layout = configure(case)
    (unit,) = measure(config, layout, 1)
    model, rows = config.model, config.train.microbatch
    assert model.hidden is not None
    assert model.heads is not None
    shape = rows, config.train.sequence_length, model.hidden
    program = record(Block(model.hidden, model.heads), shape)
    products = Counter[str]()
    for op in program.ops:
        if op.name in ("mm", "addmm"):
            (m, k), (_, n) = (program.shapes[value] for value in op.inputs[-2:])
            products["forward" if op.name == "addmm" else "backward"] += 2 * m * n * k
    assert products["forward"] == flops(unit, "F") > 0
    assert products["backward"] == flops(unit, "I") + flops(unit, "W")
    attention = {
        each.name
        for op in "FI"
        for each in unit.operations[op]  # type: ignore[index]
        if isinstance(each, Kernel) and "attention" in each.name
    }
    assert attention == {op.name for op in program.ops if "attention" in op.name}
