"""Tree search over annotations."""

from __future__ import annotations

import pytest

from examples.sharding.execute import error
from examples.sharding.models import MLP
from examples.sharding.placement import shown
from examples.sharding.plan import complete, planned_traffic
from examples.sharding.record import record
from examples.sharding.search import Search, memory


def search(batch: int, share: int, seed: int = 0) -> Search:
    """Search an MLP on two devices that hold `share` percent of parameters and gradients."""
    program = record(MLP(8, 32), (batch, 4, 8))
    alone = Search(program, 1, 0)
    whole = memory(complete(program, alone.mesh, {}))
    return Search(program, 2, whole * share // 100, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_column_and_row_split_of_an_mlp_are_rediscovered(seed: int) -> None:
    found = search(2, 60, seed).run(60)
    placed = {name: shown(found.plan.inputs[name]) for name in found.plan.program.inputs}
    assert placed == {
        "x": "B",
        "target": "B",
        "up.weight": "S0",
        "up.bias": "S0",
        "down.weight": "S1",
        "down.bias": "B",
    }
    assert planned_traffic(found.plan).counts == {("model", "all-reduce"): 2}
    assert error(found.plan, found.plan.program.random_inputs()) < 1e-12


def test_many_tokens_are_split_and_weights_gathered() -> None:
    """Activations are larger than weights then. Splitting columns and rows sends 65,536 bytes."""
    found = search(64, 60).run(60)
    assert str(found.plan.inputs["x"][0]) == "S0"
    assert found.bytes < 65_536 / 4
    assert "all-gather" in planned_traffic(found.plan).on("model")
    assert error(found.plan, found.plan.program.random_inputs()) < 1e-12


def test_nothing_is_split_where_all_fits() -> None:
    found = search(2, 100).run(30)
    assert (found.decisions, found.bytes) == ((), 0)
