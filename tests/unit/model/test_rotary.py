"""Rotary tables are those of transformers' classes, of whatever positions."""

from __future__ import annotations

import pytest
import torch

from megapipe.context.split import Order, PositionSplit
from megapipe.model.gpt.hf.config import class_of, config_to_hf
from megapipe.model.gpt.rotary import rotary_tables
from tests.unit.model.transformers_models import in_double, model_of

SCALED = ("llama", "llama_linear", "llama3.1", "llama_yarn", "llama_yarn_factor")


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("name", SCALED)
def test_tables(name: str, order: Order) -> None:
    """They agree in fp64 to 1e-12: plain ones, and those stretched by linear, llama3 and yarn."""
    model, here = model_of(name), PositionSplit(4, 1, order).own(0, 2048, 1)
    with in_double(model):
        hf = class_of(model)(config_to_hf(model)).double()
        positions = torch.tensor(list(here)).unsqueeze(0)
        expected = hf.model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    found = rotary_tables(model, here, torch.device("cpu"), torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.dtype == torch.float64
        assert (ours.squeeze() - theirs.squeeze()).abs().max() < 1e-12
