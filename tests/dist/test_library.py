"""The library over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.library.pipeline import Pipeline
from megapipe.testing import World, run_world
from tests.unit.library.models import batch, gradients, layers

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("zb_h1", {}),
    ("interleaved_1f1b", {"chunks": 2}),
    ("zb_v", {}),
    ("chimera", {}),
]


def on_a_rank(world: World) -> list[tuple[list[float], list[int], dict[str, Tensor]]]:
    """Train two steps under each schedule, with batches of two sizes; return losses, local modules,
    gradients."""
    found = []
    for name, options in SCHEDULES:
        modules = layers(dropout=0.2)
        pipe = Pipeline(modules, schedule=name, distributed=True, **options)
        losses = [pipe.step(batch(samples)) for samples in (8, 16)]
        own = {id(parameter) for parameter in pipe.parameters()}
        here = [i for i, m in enumerate(modules) if own & {id(p) for p in m.parameters()}]
        found.append((losses, here, gradients(modules)))
    return found


def test_ranks_give_what_one_process_gives() -> None:
    ranks = run_world(2, on_a_rank)
    for number, (name, options) in enumerate(SCHEDULES):
        modules = layers(dropout=0.2)
        pipe = Pipeline(modules, schedule=name, ranks=2, **options)
        wanted = [pipe.step(batch(samples)) for samples in (8, 16)]
        grads = gradients(modules)
        seen = set()
        for results in ranks:
            losses, here, found = results[number]
            assert losses == pytest.approx(wanted, abs=1e-10)
            seen |= set(here)
            for key, grad in grads.items():
                if int(key.partition(".")[0]) in here:
                    assert (found[key] - grad).abs().max() <= 1e-10, (name, key)
        assert seen == {i for i, module in enumerate(modules) if list(module.parameters())}


def tied(world: World) -> str:
    modules = layers()
    modules[-1].weight = modules[0].weight
    try:
        Pipeline(modules, distributed=True)
    except ConfigError as error:
        return str(error)
    return ""


def unlike_meta(world: World) -> str:
    class Picky(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > -1e9 else -x

    try:
        Pipeline([*layers()[:2], Picky(), *layers()[2:]], distributed=True).step(batch())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_what_ranks_cannot_do_is_one_line_on_each() -> None:
    for text in run_world(2, tied):
        assert text.startswith("modules: stages 0 and 1 share a parameter of shape [11, 8] but ")
    for text in run_world(2, unlike_meta):
        assert text.startswith("module 2 fails on the meta device: ")
