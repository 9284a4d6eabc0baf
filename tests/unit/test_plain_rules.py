"""The plain update rules against torch's own, and against each other."""

from __future__ import annotations

import pytest
import torch

from tests.parity.optim_rules import PLAIN, RATES, by_formula, draw, error, expected, model
from tests.parity.plain_rules import by_products, by_singular_values, step

ELEMENTWISE = [name for name in PLAIN if PLAIN[name].run is not by_formula]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_formulas_are_torch_s_rules(name: str) -> None:
    assert PLAIN[name].config.rule in ("adamw", "adam", "sgd", "rmsprop", "nadamw")
    grads = [draw(model(), "grad", i, torch.float64) for i in range(len(RATES))]
    found = by_formula(draw(model(), "weight", 0, torch.float64), PLAIN[name].config, grads)
    assert error(found, expected(name)) < 1e-13


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (2, 6, 4)])
def test_products_pass_singular_values_through_the_same_quintic(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    exact = by_singular_values(matrix)
    torch.testing.assert_close(by_products(matrix, torch.float64), exact, rtol=0, atol=1e-12)
    rounded = (by_products(matrix) - exact).norm() / exact.norm()
    assert 0.003 < rounded < 0.1, "bf16's 2^-8, which small singular values magnify"


def test_nothing_given_is_changed() -> None:
    torch.manual_seed(0)
    for name in PLAIN:
        weight, grad = torch.randn(4, 6).double(), torch.randn(4, 6).double()
        copies = weight.clone(), grad.clone()
        config, states = PLAIN[name].config, {}
        for count in range(2):
            _, states = step(config, "layers.0.mlp.up.weight", weight, grad, states, 0.1, count)
        assert weight.equal(copies[0])
        assert grad.equal(copies[1])
