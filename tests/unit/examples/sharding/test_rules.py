"""Sharding rules: each is executed, and none that holds is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from examples.sharding.placement import BROADCAST, PARTIAL, Placement, split
from examples.sharding.program import Op, Program
from examples.sharding.record import record_function
from examples.sharding.rules import RULES, Signature, rule, signatures
from examples.sharding.verify import check, verify
from megapipe.errors import ConfigError


def recorded(call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Program:
    given = {f"x{i}": torch.zeros(shape, dtype=torch.float64) for i, shape in enumerate(shapes)}
    return record_function(lambda inputs: {"y": call(*inputs.values())}, given)


OTHERS = {
    "bmm": recorded(torch.bmm, (4, 6, 8), (4, 8, 2)),
    "sub": recorded(torch.sub, (4, 6), (6,)),
    "_unsafe_view": recorded(lambda x: torch.ops.aten._unsafe_view(x, [24, 8]), (4, 6, 8)),
    "mul": recorded(torch.mul, (4, 6), (4, 1)),
    "sum": recorded(lambda x: x.sum(1), (4, 6, 8)),
    "view": recorded(lambda x: x.view(2, 2, 24, 2), (4, 6, 8)),
}
"""Programs of one operation that the block does not have, or not with such shapes."""


@pytest.mark.parametrize("devices", [2, 4])
def test_every_signature_of_the_block_is_right(block: Program, devices: int) -> None:
    checks = verify(block, block.random_inputs(), devices)
    assert {each.op.name for each in checks} == {op.name for op in block.ops}
    assert max(each.error for each in checks) < 1e-12
    assert {op.name for op in block.ops} | set(OTHERS) == set(RULES)


@pytest.mark.parametrize("name", OTHERS)
def test_signatures_of_other_operations_are_right(name: str) -> None:
    program = OTHERS[name]
    assert [op.name for op in program.ops] == [name]
    checks = verify(program, program.random_inputs())
    assert len(checks) > 2
    assert max(each.error for each in checks) < 1e-12


def holding(op: Op, program: Program) -> set[Signature]:
    """Try all placements of inputs and outputs; return those that give the right result."""
    tensors = program.random_inputs()
    inputs = [tensors[name] for name in op.inputs]

    def ways(value: str) -> list[Placement]:
        return [BROADCAST, PARTIAL, *map(split, range(len(program.shapes[value])))]

    found = set()
    for places in product(*map(ways, (*op.inputs, *op.outputs))):
        each = Signature(places[: len(inputs)], places[len(inputs) :])
        done = check(op, each, inputs, 2, torch.Generator().manual_seed(0))
        if done is not None and done.error < 1e-9:
            found.add(each)
    return found


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (recorded(torch.mm, (4, 6), (6, 8)), 6),
        (recorded(torch.addmm, (8,), (4, 6), (6, 8)), 6),
        (recorded(torch.add, (4, 6), (4, 6)), 4),
        (recorded(torch.mul, (4, 6), (4, 6)), 5),
        (recorded(torch.nn.functional.gelu, (4, 6)), 3),
        (recorded(torch.t, (4, 6)), 4),
        (recorded(torch.sum, (4, 6)), 4),
    ],
    ids=lambda each: each.ops[0].name if isinstance(each, Program) else "",
)
def test_the_table_has_all_that_holds_and_nothing_else(program: Program, count: int) -> None:
    (op,) = program.ops
    table = set(rule(op, program.shapes).signatures())
    assert len(table) == count
    assert table == holding(op, program)


def test_the_table_of_a_matrix_product_is_the_published_one() -> None:
    """It is table 1 of OneFlow (2110.15032), and broadcast."""
    program = recorded(torch.mm, (4, 6), (6, 8))
    assert list(map(str, signatures(program.ops[0], program))) == [
        "B B -> B",
        "S0 B -> S0",
        "S1 S0 -> P",
        "B S1 -> S1",
        "P B -> P",
        "B P -> P",
    ]


def test_merged_dimensions_are_split_by_the_first_of_them() -> None:
    program = recorded(lambda x: x.view(24, 2, 4), (4, 6, 8))
    own = rule(program.ops[0], program.shapes)
    assert (own.inputs, own.outputs) == (("a.b",), ("ab.",))


def test_a_wrong_signature_is_noticed(block: Program) -> None:
    values = block.run(block.random_inputs())
    gelu = next(op for op in block.ops if op.name == "gelu")
    norm = next(op for op in block.ops if op.name == "native_layer_norm")
    for op, ins, outs in (
        (gelu, (PARTIAL,), (PARTIAL,)),
        (gelu, (split(0),), (split(1),)),
        (gelu, (split(0),), (BROADCAST,)),
        (norm, (split(2), BROADCAST, BROADCAST), (split(2), BROADCAST, BROADCAST)),
    ):
        inputs = [values[name] for name in op.inputs]
        done = check(op, Signature(ins, outs), inputs, 2, torch.Generator().manual_seed(0))
        assert done is not None
        assert done.error > 1e-3


def test_an_operation_without_a_rule_is_refused(block: Program) -> None:
    unknown = replace(block.ops[0], name="fft")
    with pytest.raises(ConfigError, match="operation fft has no rule"):
        rule(unknown, block.shapes)
