"""The report on plans: what each method chooses for a block, what it sends, and whether it is
equal."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from examples.sharding.bisection import bisect
from examples.sharding.boxing import ITEM
from examples.sharding.dims import GPT_BLOCK, layout_hints
from examples.sharding.execute import error, execute
from examples.sharding.models import MLP, Block
from examples.sharding.placement import Mesh, Shape, shown
from examples.sharding.plan import Plan, complete
from examples.sharding.program import Program
from examples.sharding.propagation import propagate
from examples.sharding.record import record
from examples.sharding.search import Search
from examples.sharding.substitution import SUBSTITUTIONS, Value, best, evaluate, verified
from examples.sharding.tactics import strategies, tensor_parallel
from examples.sharding.verify import verify
from megapipe.errors import ConfigError


class Sizes(NamedTuple):
    """Sizes of the block and of its input."""

    hidden: int
    heads: int
    batch: int
    sequence: int

    @property
    def shape(self) -> Shape:
        """Shape of the block's input."""
        return self.batch, self.sequence, self.hidden


def plans(sizes: Sizes) -> Iterator[str]:
    """Yield the lines of the report.

    Raises:
        ConfigError: sizes that are no block, or that two devices cannot share.
    """
    if min(sizes) < 1 or sizes.hidden % sizes.heads:
        raise ConfigError(
            f"sizes {sizes._asdict()}: all are at least 1, and heads divide hidden equally"
        )
    if sizes.heads % 2 or sizes.batch % 4:
        raise ConfigError(
            f"sizes {sizes._asdict()}: heads have to be a multiple of 2, batch of 4, since devices "
            "and micro-batches get equal parts"
        )
    program = record(Block(sizes.hidden, sizes.heads), sizes.shape)
    checks = verify(program, program.random_inputs())
    kinds = len({op.name for op in program.ops})
    yield f"A GPT block, forward and backward: {len(program.ops)} operations of {kinds} kinds."
    yield (
        f"{len(checks)} signatures executed on two devices: "
        f"largest difference {max(check.error for check in checks):.0e}"
    )
    mesh = Mesh((("model", 2), ("data", 2)))
    yield f"\nPlans of the block on {dict(mesh.axes)}"
    hints = propagate(program, mesh, "model", tensor_parallel("model").annotations, {})
    yield from _lines("GSPMD, two annotations", complete(program, mesh, hints))
    yield from _lines("OneFlow, sums deferred", complete(program, mesh, hints, deferred=True))
    layout = {"batch": "data", "heads": "model", "wide": "model"}
    table = layout_hints(program, mesh, GPT_BLOCK, layout)
    yield from _lines("Mesh-TensorFlow, table", complete(program, mesh, table))
    for name, plan in strategies(program, mesh, "data", "model").items():
        yield from _lines(f"PartIR, {name}", plan)
    yield "\nSearches on 2 devices that hold 60% of parameters and gradients, and halvings for 4"
    yield from _lines("Automap, block", _searched(program, 40))
    mlp = record(MLP(sizes.hidden, 4 * sizes.hidden), sizes.shape)
    yield from _lines("Automap, MLP", _searched(mlp, 60))
    layers = (nn.Linear(sizes.hidden, sizes.hidden, bias=False) for _ in range(3))
    rows = sizes.batch * sizes.sequence
    products = record(nn.Sequential(*layers), (rows, sizes.hidden), backward=False)
    yield from _lines("Tofu, three products", bisect(products, 2))
    yield from _substituted(sizes)


def _lines(name: str, plan: Plan) -> Iterator[str]:
    """Yield what a plan sends, its error, and the placements of the matrices."""
    tensors = plan.program.random_inputs()
    sent = execute(plan, tensors).traffic
    yield f"  {name}: {sent}; {sent.bytes:,} bytes; error {error(plan, tensors):.0e}"
    matrices = (each for each in plan.program.inputs if len(plan.program.shapes[each]) == 2)
    yield "    " + ", ".join(
        f"{each.removesuffix('.weight')} {shown(plan.inputs[each])}" for each in matrices
    )


def _searched(program: Program, iterations: int) -> Plan:
    whole = sum(2 * ITEM * prod(program.shapes[name]) for name in program.parameters)
    return Search(program, devices=2, memory=whole * 6 // 10).run(iterations).plan


def _substituted(sizes: Sizes) -> Iterator[str]:
    """Yield what substitutions make of an MLP, with and without those that split rows."""
    good = [each for each in SUBSTITUTIONS if verified(each)]
    yield f"\nUnity: {len(good)} of {len(SUBSTITUTIONS)} substitutions are equal on random tensors"
    generator = torch.Generator().manual_seed(0)
    rows, h = sizes.batch * sizes.sequence, sizes.hidden
    values: dict[str, Value] = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"x": (rows, h), "up": (h, 4 * h), "down": (4 * h, h)}.items()
    }
    plain = ("mm", ("gelu", ("mm", "x", "up")), "down")
    columns = [each for each in good if each.name != "split rows"]
    for name, allowed in {"all": good, "without split rows": columns}.items():
        found, cost = best(plain, values, 2, allowed)
        (made, _), (wanted, _) = (evaluate(each, values, 2) for each in (found, plain))
        assert isinstance(made, Tensor)
        assert isinstance(wanted, Tensor)
        off = float((made - wanted).abs().max())
        yield f"  {name}: {_text(found)}; {cost.bytes:,} bytes; error {off:.0e}"


def _text(expr: object) -> str:
    """Return an expression as it is written by hand."""
    if not isinstance(expr, tuple):
        return str(expr)
    return f"{expr[0]}({', '.join(map(_text, expr[1:]))})"
