"""The same texts and the same likelihoods at every layout, uneven stages among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.evaluate.multiple_choice import Question, answer
from megapipe.evaluate.perplexity import measure
from megapipe.evaluate.scoring import ScoredRow, scores
from megapipe.evaluate.texts import of_texts
from megapipe.generate import Generator, Sampling
from megapipe.layout.model_spec import make_model_spec
from megapipe.model.interface import RunShape
from megapipe.testing import World, run_world
from tests.parity.in_memory_models import BYTES, held_model
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

CONTEXT = 19
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"document_mask": True, "reset_position_ids": True},
    "llama_gqa": {},
    "gemma2": {},
    "bloom": {},
}
"""Models of three layers, the first with tied embeddings, and how they read documents."""
OWN = ("tuples", "parallel")
"""User models, which keep no keys and values; the first is not split over tp."""
PROMPTS = ["", "a prompt that is longer than the context", "ab", "ab"]
SAMPLINGS = (
    Sampling(tokens=7, temperature=0),
    Sampling(tokens=7, temperature=1.5, top_k=50, top_p=0.9, seed=3),
)
QUESTIONS = [Question("two and", ("a", "a long one"), 1, "1"), Question("", ("x", "y"), 0, "2")]


def model_and_weights(case: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    if case not in OWN:
        built_in = model_of(case).model_copy(update={"vocab_size": 257, "max_positions": CONTEXT})
        return built_in, init_random(built_in, seed=4)
    source, options = f"tests.parity.user_models:{case}", {"depth": 5}
    own = ModelConfig(source=source, options=options, vocab_size=257, dtype="fp64")
    shapes = make_model_spec(own, RunShape(CONTEXT, microbatch=1)).shapes()
    draw = torch.Generator().manual_seed(4)
    return own, {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def everything(case: str, mesh: ParallelMesh | None) -> tuple[list[Any], list[float]]:
    """Return texts that are to be equal, and numbers that are to be equal up to rounding."""
    config, params = model_and_weights(case)
    model = held_model(config, params, context=CONTEXT, mesh=mesh, **CASES.get(case, {}))
    texts: list[Any] = [
        list(Generator(model).generate(PROMPTS, sampling, batch=4)) for sampling in SAMPLINGS
    ]
    rows = [ScoredRow([256, *b"some words", 256, *b"and"][:n], 1) for n in range(2, 14)]
    found = list(scores(model, rows, batch=1))  # more batches than are under way at a time
    texts.append([score.greedy for score in found])
    numbers = np.concatenate([score.likelihoods for score in found]).tolist()
    numbers.append(measure(model, of_texts([PROMPTS[1], "x"], BYTES), stride=9).loss)
    texts.append(answer(model, QUESTIONS, batch=3))
    return texts, numbers


def cases_of(grid: Grid) -> list[str]:
    return [*CASES, OWN[grid.tp > 1]]


def on_rank(world: World, grid: Grid) -> list[tuple[list[Any], list[float]]]:
    return [everything(case, world.mesh(grid)) for case in cases_of(grid)]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[Any], list[float]]]:
    return {case: everything(case, None) for case in (*CASES, *OWN)}


@pytest.mark.full
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(Grid(tp=2), id="tp2", marks=pytest.mark.slow),
        pytest.param(Grid(pp=2), id="pp2", marks=pytest.mark.slow),
        pytest.param(Grid(pp=2, tp=2), id="tp2 pp2"),
    ],
)
def test_texts_and_likelihoods_are_those_of_one_process(
    grid: Grid, alone: dict[str, tuple[list[Any], list[float]]]
) -> None:
    for rank in run_world(grid.world, on_rank, grid):
        for case, (texts, numbers) in zip(cases_of(grid), rank, strict=True):
            expected, like = alone[case]
            assert texts == expected
            np.testing.assert_allclose(numbers, like, rtol=1e-9, atol=0)
