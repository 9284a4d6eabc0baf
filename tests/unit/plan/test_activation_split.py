"""The share of activations that input gradients free, and the orders that use it."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import BYTE_VOCABULARY, resolve
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.units import Units
from megapipe.schedule.generators import build
from megapipe.schedule.memory import peak_held, peak_weighted

BASE = (
    "model.layers=8",
    "model.heads=16",
    "model.hidden=64",
    "parallel.pp=4",
    "parallel.device=cpu",
    "train.sequence_length=256",
    "train.microbatch=1",
    "train.global_batch=12",
)
SCORES = "model.dropout=0.1"
"""On the CPU attention with dropout keeps scores, which no weight gradient needs."""


def configure(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*BASE, *keys]).config, None, None, measure=BY_UNITS)


def share(config: Config, layout: Layout) -> Fraction:
    """Return the least share that an input gradient frees in a stage, in whole thousandths."""
    units = Units(config, layout)
    found = [unit for stage in range(layout.stages) for unit in units.of(stage)]
    return Fraction(min(1000 * (each.held - each.queued) // each.held for each in found), 1000)


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p"])
def test_orders_within_a_limit_use_what_is_free(name: str) -> None:
    """They hold more micro-batches than the limit, but not more bytes than it stands for."""
    key = f"pipeline.schedule={name}"
    config, layout = configure(key, SCORES, "pipeline.activation_limit=4")
    assert layout.freed_by_input_grad == share(config, layout)
    given = {"ranks": 4, "microbatches": 12, "activation_limit": 4, "cost": layout.cost}
    assert layout.schedule.ops == build(name, **given, freed=layout.freed_by_input_grad).ops
    assert (
        max(peak_weighted(layout.schedule, layout.freed_by_input_grad))
        <= 4
        < max(peak_held(layout.schedule))
    )
    alone = configure("pipeline.schedule=1f1b", SCORES, "train.global_batch=1")
    units, of_one = Units(config, layout), Units(*alone)
    for rank in range(4):
        most = peak_activations(units, rank, inside=False).device
        assert most <= 4 * peak_activations(of_one, rank, inside=False).device

    _, fused = configure(key, "pipeline.activation_limit=4")
    assert fused.freed_by_input_grad == 0, "the embedding's gradients wait, and scores are not kept"
    assert fused.schedule.ops == build(name, **{**given, "cost": fused.cost}).ops
    assert max(peak_held(fused.schedule)) <= 4


def test_batches_that_grow_to_it_too() -> None:
    keys = ("pipeline.schedule=zb_1p", SCORES, "train.batch_ramp=[8,4,100]")
    _, layout = configure(*keys)
    smaller = build(
        "zb_1p", ranks=4, microbatches=8, cost=layout.cost, freed=layout.freed_by_input_grad
    )
    assert layout.ramp_schedules[8].ops == smaller.ops
    assert max(peak_held(smaller)) > 4


OWN = """
from megapipe.schedule.generators import build

def given(ranks, microbatches, cost=None, freed=0):
    return build("zb_1p", ranks=ranks, microbatches=microbatches, cost=cost, freed=freed)

def generous(ranks, microbatches, cost=None):
    return given(ranks, microbatches, cost, freed=0.9)
"""


def test_functions_of_one_s_own_are_given_it_and_held_to_the_limit_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "freed_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "freed_own", raising=False)
    limit = "pipeline.activation_limit=4"
    named = configure("pipeline.schedule=zb_1p", SCORES)[1].schedule
    _, layout = configure("pipeline.schedule=freed_own:given", SCORES, limit)
    assert layout.schedule.ops == named.ops
    assert max(peak_held(named)) > 4
    with pytest.raises(
        ConfigError, match=r"activation_limit=4: schedule zb_1p holds the activations"
    ):
        configure("pipeline.schedule=freed_own:generous", limit)


def test_it_is_known_with_the_tokenizer() -> None:
    """The head's share counts, so the order is made when the vocabulary is known."""
    keys = ("pipeline.schedule=zb_1p", SCORES)
    config, layout = configure(*keys, "data.tokenizer=some/where")
    assert layout.freed_by_input_grad == 0
    _, known = resolve(config, None, BYTE_VOCABULARY, before=layout, measure=BY_UNITS)
    other = configure(*keys)[1]
    assert (known.freed_by_input_grad, known.schedule.ops) == (
        other.freed_by_input_grad,
        other.schedule.ops,
    )


def test_a_layout_is_final_once_it_is_measured() -> None:
    """Ranks of a launched run measure it later, when nothing else has changed."""
    keys = ("pipeline.schedule=zb_1p", SCORES, "pipeline.activation_limit=4")
    config, early = resolve(parse([*BASE, *keys]).config, None, BYTE_VOCABULARY)
    assert early.schedule.whole_microbatches == 1
    _, known = resolve(config, None, BYTE_VOCABULARY, before=early, measure=BY_UNITS)
    final = configure(*keys)[1]
    assert final.freed_by_input_grad > 0
    assert (known.freed_by_input_grad, known.schedule.ops) == (
        final.freed_by_input_grad,
        final.schedule.ops,
    )
