"""The choice of a token: who may be chosen, and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.generate.sampling import Sampling, sample_token

ODDS = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.1, 0.2])
DRAWS = 1500


def drawn(sampling: Sampling, odds: torch.Tensor = ODDS) -> Counter[int]:
    logits = odds.log().clamp(min=-1e4)
    source = sampling.source(0)
    return Counter(sample_token(logits, sampling, source) for _ in range(DRAWS))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, {0, 1, 3, 4, 5}),
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 99}, {0, 1, 3, 4, 5}),
        ({"top_p": 0.6}, {1, 3}),  # 0.4 is not enough, 0.65 is
        ({"top_p": 0.66}, {1, 3, 5}),
        ({"top_p": 1.0}, {0, 1, 3, 4, 5}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),  # 0.4 of the 0.85 that are left is not half
        ({"top_k": 3, "top_p": 0.45}, {1}),
        ({"temperature": 0.5}, {0, 1, 3, 4, 5}),
    ],
)
def test_tokens_come_as_often_as_they_should(settings: dict[str, Any], allowed: set[int]) -> None:
    sampling = Sampling(**{"temperature": 1.0, **settings})
    odds = ODDS.double() ** (1 / sampling.temperature)
    odds = torch.tensor([p if i in allowed else 0.0 for i, p in enumerate(odds.tolist())])
    odds /= odds.sum()
    found = drawn(sampling)
    assert set(found) == allowed
    for token, share in enumerate(odds.tolist()):
        sigma = (share * (1 - share) * DRAWS) ** 0.5
        assert abs(found[token] - share * DRAWS) <= 4 * sigma, token


def test_one_number_is_taken_per_token_whatever_is_chosen() -> None:
    one, other = Sampling().source(0), Sampling().source(0)
    sample_token(torch.zeros(7), Sampling(), one)
    sample_token(torch.arange(9.0), Sampling(top_k=2, top_p=0.5), other)
    assert torch.equal(one.get_state(), other.get_state())
    assert not torch.equal(one.get_state(), Sampling().source(0).get_state())
    assert not torch.equal(Sampling().source(1).get_state(), Sampling().source(0).get_state())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"stop": ("a", "")},
    ],
)
def test_a_value_without_sense_is_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    shown = "''" if name == "stop" else value
    with pytest.raises(ConfigError, match=f"^{name}={shown}: expected"):
        Sampling(**wrong)
