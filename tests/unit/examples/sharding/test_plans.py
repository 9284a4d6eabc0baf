"""Plans by propagation, by named dimensions and by tactics; their collectives and their results."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from examples.sharding.dims import GPT_BLOCK, layout_hints, name_dims
from examples.sharding.execute import error, execute
from examples.sharding.models import MLP
from examples.sharding.placement import Mesh, Placements, split
from examples.sharding.plan import Plan, complete, planned_traffic
from examples.sharding.program import Program
from examples.sharding.propagation import propagate, shifted_pipeline
from examples.sharding.record import record
from examples.sharding.tactics import apply_tactics, data_parallel, strategies, tensor_parallel
from megapipe.errors import ConfigError

COLUMNS_THEN_ROWS = {
    **{f"attention.{each}.weight": "S0" for each in "qkv"},
    **{f"attention.{each}.bias": "S0" for each in "qkv"},
    "attention.out.weight": "S1",
    "attention.out.bias": "B",
    "mlp.up.weight": "S0",
    "mlp.up.bias": "S0",
    "mlp.down.weight": "S1",
    "mlp.down.bias": "B",
    **{f"{each}_norm.{kind}": "B" for each in ("attention", "mlp") for kind in ("weight", "bias")},
}
"""The column and row split of Megatron-LM (1909.08053); torch's weights are [out, in]."""


def on_first_axis(plan: Plan) -> Mapping[str, str]:
    return {name: str(plan.inputs[name][0]) for name in plan.program.parameters}


def is_equal(plan: Plan) -> bool:
    """Whether loss and gradients are those of one device, and traffic is as planned."""
    tensors = plan.program.random_inputs()
    assert execute(plan, tensors).traffic == planned_traffic(plan)
    return error(plan, tensors) < 1e-12


def test_propagation_over_ten_operations_is_the_sharding_by_hand() -> None:
    program = record(nn.Sequential(MLP(8, 16), MLP(8, 16)), (4, 8), backward=False)
    assert len(program.ops) == 10
    mesh = Mesh((("model", 2), ("data", 2)))
    first = {"0.up.weight": split(0), "1.up.weight": split(0)}
    hints = propagate(program, mesh, "model", first, {})
    hints = propagate(program, mesh, "data", {"x": split(0)}, hints)
    by_hand = {
        "x": "-0",
        "t": "1-",
        "addmm": "10",
        "gelu": "10",
        "t_1": "0-",
        "addmm_1": "-0",
        "t_2": "1-",
        "addmm_2": "10",
        "gelu_1": "10",
        "t_3": "0-",
        "addmm_3": "-0",
    }
    for layer in "01":
        by_hand |= {
            f"{layer}.up.weight": "0-",
            f"{layer}.up.bias": "0-",
            f"{layer}.down.weight": "1-",
        }
    assert {
        value: "".join("-" if place is None else str(place.dim) for place in places)
        for value, places in hints.items()
    } == by_hand
    plan = complete(program, mesh, hints)
    assert planned_traffic(plan).counts == {("model", "all-reduce"): 2}
    assert is_equal(plan)


def test_a_fixed_point_stays(block: Program, mesh: Mesh) -> None:
    known = tensor_parallel("model").annotations
    once = propagate(block, mesh, "model", known, {})
    assert propagate(block, mesh, "model", {}, once) == once
    assert len(once) > len(known)


def test_a_table_of_dimensions_gives_columns_then_rows(block: Program, mesh: Mesh) -> None:
    layout = {"batch": "data", "heads": "model", "wide": "model"}
    plan = complete(block, mesh, layout_hints(block, mesh, GPT_BLOCK, layout))
    assert on_first_axis(plan) == COLUMNS_THEN_ROWS
    assert plan.inputs["x"] == plan.inputs["target"]
    assert str(plan.inputs["x"][1]) == "S0"
    assert is_equal(plan)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ({}, {}),
        ({"batch": "data"}, {("data", "all-reduce"): 17}),
        (
            {"batch": "model", "wide": "data"},
            {("model", "all-reduce"): 17, ("data", "all-reduce"): 2},
        ),
    ],
)
def test_other_tables(
    layout: dict[str, str], kinds: dict[tuple[str, str], int], block: Program, mesh: Mesh
) -> None:
    plan = complete(block, mesh, layout_hints(block, mesh, GPT_BLOCK, layout))
    assert planned_traffic(plan).counts == kinds
    assert is_equal(plan)


def test_dimension_names_that_cannot_be(block: Program) -> None:
    with pytest.raises(ConfigError, match=r"x of shape \(4, 6, 8\) has 1 names"):
        name_dims(block, {"x": ("batch",)})
    with pytest.raises(ConfigError, match="head, width are one dimension"):
        name_dims(block, {"mlp.up.bias": ("head",), "mlp.down.weight": ("", "width")})


PARAMETERS = 16
MATRICES = 6
EXPECTED = {
    # a gradient of each parameter, and the loss
    "DP": {("data", "all-reduce"): PARAMETERS + 1},
    # and one after each row-split matrix forward, one before each column-split pair backward
    "DP+TP": {("data", "all-reduce"): PARAMETERS + 1, ("model", "all-reduce"): 4},
    "DP+TP+ZeRO-2": {
        ("data", "reduce-scatter"): PARAMETERS,
        ("data", "all-reduce"): 1,
        ("model", "all-reduce"): 4,
    },
    # parameters are gathered in the forward, matrices once more in the backward
    "DP+TP+ZeRO-3": {
        ("data", "reduce-scatter"): PARAMETERS,
        ("data", "all-gather"): PARAMETERS + MATRICES,
        ("data", "all-reduce"): 1,
        ("model", "all-reduce"): 4,
    },
}


def test_tactics_give_the_collectives_that_one_counts(block: Program, mesh: Mesh) -> None:
    plans = strategies(block, mesh, "data", "model")
    assert {name: planned_traffic(plan).counts for name, plan in plans.items()} == EXPECTED
    assert all(map(is_equal, plans.values()))
    assert on_first_axis(plans["DP+TP"]) == COLUMNS_THEN_ROWS


def test_an_earlier_tactic_has_priority(block: Program, mesh: Mesh) -> None:
    samples = data_parallel("data")
    later = samples._replace(annotations={"mlp.up.weight": split(0)})
    hints = apply_tactics(block, mesh, [samples, later])
    assert hints["mlp.up.weight"] == (None, split(0))
    assert "mlp.up.bias" not in hints
    assert "mlp.up.bias" in apply_tactics(block, mesh, [later])
    plan = complete(block, mesh, hints)
    assert planned_traffic(plan).on("data") == {"all-reduce": 17, "all-gather": 2}
    assert is_equal(plan)


def test_deferred_sums_send_fewer_bytes(block: Program, mesh: Mesh) -> None:
    hints = apply_tactics(block, mesh, [tensor_parallel("model")])
    eager, deferred = (complete(block, mesh, hints, deferred=each) for each in (False, True))
    assert planned_traffic(deferred).bytes < planned_traffic(eager).bytes
    assert is_equal(deferred)


def test_a_plan_of_four_devices_on_an_axis(block: Program) -> None:
    mesh = Mesh((("model", 4),))
    plan = complete(block, mesh, apply_tactics(block, mesh, [tensor_parallel("model")]))
    assert planned_traffic(plan).counts == {("model", "all-reduce"): 4}
    assert is_equal(plan)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"nothing": (split(0), None)}, "value 'nothing' is unknown"),
        ({"x": (None, split(1))}, None),
        ({"x": (split(5), None)}, "cannot be placed"),
    ],
)
def test_hints_that_cannot_be(
    hints: dict[str, Placements], message: str | None, block: Program, mesh: Mesh
) -> None:
    if message is None:
        assert is_equal(complete(block, mesh, dict(hints)))
        return
    with pytest.raises(ConfigError, match=message):
        complete(block, mesh, dict(hints))


def test_an_unknown_axis_is_refused(block: Program, mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match="axis 'pipe' is unknown; axes are model, data"):
        propagate(block, mesh, "pipe", {"x": split(0)}, {})


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 1), (4, 6)])
def test_a_shifted_pipeline_is_the_stages_one_after_the_other(
    stages: int, microbatches: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(stages, 8, 8, generator=generator, dtype=torch.float64) / 3
    x = torch.randn(microbatches, 5, 8, generator=generator, dtype=torch.float64)
    leaves = weights.requires_grad_(), x.requires_grad_()
    shifted = shifted_pipeline(lambda state, own: torch.bmm(state, own).tanh(), weights, x)
    plain = x
    for weight in weights:
        plain = (plain @ weight).tanh()
    assert torch.allclose(shifted, plain, rtol=0, atol=1e-14)
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), leaves) for y in (shifted, plain)), strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
