"""A recorded block, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from examples.sharding.models import Block
from examples.sharding.placement import Mesh
from examples.sharding.program import Program
from examples.sharding.record import record, record_function


@pytest.fixture(scope="session")
def block() -> Program:
    """Record a GPT block of width 8 with 4 heads, on 4 samples of 6 tokens."""
    return record(Block(8, 4), (4, 6, 8))


@pytest.fixture
def mesh() -> Mesh:
    """Make a mesh of two by two devices."""
    return Mesh((("model", 2), ("data", 2)))


@pytest.fixture(scope="session")
def products() -> Callable[..., Program]:
    """Return a function that records a chain of matrix products between lengths."""

    def chain(*lengths: int) -> Program:
        given = {
            f"w{index}": torch.zeros(own, dtype=torch.float64)
            for index, own in enumerate(pairwise(lengths))
        }

        def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            first, *rest = inputs.values()
            for weight in rest:
                first = first @ weight
            return {"y": first}

        return record_function(call, given)

    return chain
