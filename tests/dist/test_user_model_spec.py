"""A user-defined family, which shares no layer with the package, trains as its formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Grid
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.report import report
from megapipe.testing import World, run_world
from tests.parity.cases import Case, batch_of, configure
from tests.parity.compare import assert_grads_close, assert_scalar_close
from tests.parity.outcome import Outcome, assemble
from tests.parity.ranks import train
from tests.parity.tiny_family import Tiny, loss_of, run_tiny

DEPTH, WIDTH = 5, 6


def settle(case: Case, **options: int) -> tuple[Config, Layout]:
    model = ModelConfig(
        source="tests.parity.tiny_family:Tiny",
        options={"width": WIDTH, "depth": DEPTH, **options},
        vocab_size=case.vocab,
        dtype="fp64",
    )
    config, _ = configure(case)
    config = config.model_copy(update={"model": model})
    return resolve(config, case.world, case.vocab, measure=BY_UNITS)


def run_tiny_cases(world: World, cases: list[Case]) -> list[Outcome]:
    results = []
    for case in cases:
        config, layout = settle(case)
        step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp)))
        results.append(train(step, case, validate=False))
    return results


CASES = [
    Case(masked=0.3),
    Case(dp=2, zero=2, masked=0.3),
    Case(pp=2, m=4, schedule="zb_h1"),
    Case(pp=2, dp=2, m=4, schedule="chimera"),
    Case(pp=3, m=3, activations="stage", zero=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name or "alone")
def test_losses_and_gradients_are_those_of_the_formulas(case: Case) -> None:
    case = replace(case, steps=2)
    outcomes = [ranks[0] for ranks in run_world(case.world, run_tiny_cases, [case])]
    like: dict[str, Tensor] = {"first": torch.empty(case.vocab, WIDTH)}
    like |= {f"inner.{i}": torch.empty(WIDTH, WIDTH) for i in range(DEPTH)}
    like["last"] = torch.empty(WIDTH, case.vocab)
    for i in range(case.steps):
        parts = [outcome.values[i].get("model", []) for outcome in outcomes]
        weights = {n: w.requires_grad_() for n, w in assemble(parts, like).items()}
        tokens, labels, mask = batch_of(case, i)
        loss = loss_of(run_tiny(list(weights.values()), None, tokens), labels, mask) / mask.sum()
        loss.backward()
        grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        assert_scalar_close("loss", outcomes[0].losses[i], loss.item(), 1e-10)
        assert_grads_close(assemble([o.grads[i] for o in outcomes], like), grads)


def test_the_plan_reads_the_family() -> None:
    config, layout = settle(Case(pp=2))
    assert isinstance(layout.model, Tiny)
    text = report(config, layout)
    numel = 2 * 300 * WIDTH + DEPTH * WIDTH**2
    assert (
        f"model         tiny, 5 layers of width 6\nvocabulary    300\nparameters    {numel:,}"
        in text
    )
    assert "E L*5 | H" in text


def test_what_it_lacks_is_refused() -> None:
    for case, words in (
        (Case(tp=2), "parallel.tp=2: Tiny has no support for it; expected 1"),
        (Case(activations="full"), "activations.policy=full: Tiny has no support"),
        (Case(pp=2, m=2, schedule="seq1f1b", slices=2), "cuts sequences into slices, which Tiny"),
        (Case(documents=True), "data.document_mask=true: Tiny has no support"),
        (Case(compile=True), "kernels.compile=true: Tiny has no support"),
    ):
        with pytest.raises(ConfigError, match=words):
            settle(case)
    with pytest.raises(ConfigError, match="width=7 is odd"):
        settle(Case(), width=7)
