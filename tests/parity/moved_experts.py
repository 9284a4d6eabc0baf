"""Runs whose experts change owners, by drawn maps."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import write_pools
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.testing import World
from megapipe.train.moe import migration
from tests.parity import reference
from tests.parity.cases import END, SLOW, Case, configure
from tests.parity.in_memory_models import HeldWeights
from tests.parity.outcome import Outcome, take_region
from tests.parity.random_owners import drawn_map
from tests.parity.ranks import train


@contextmanager
def by_draw(seed: int = 1) -> Iterator[None]:
    """Let each layer take drawn owners whenever it decides, equal on all ranks."""
    numbers = itertools.count(seed)

    def draw(present: ExpertMap, *_: Any) -> ExpertMap:
        return drawn_map(present, next(numbers))

    with mock.patch.object(migration, "migrate", draw):
        yield


def layers_of(step: TrainStep) -> Iterator[RoutedExperts]:
    """Yield the local MoE layers."""
    for _, module in sorted(step.modules.items()):
        for layer in module.modules():
            if isinstance(layer, RoutedExperts):
                yield layer


def with_policy(
    case: Case, folder: str, every: int = 1, owners: Sequence[int] = ()
) -> tuple[Config, Layout]:
    """Return the configuration of a case whose experts migrate. Its pool, in a folder, has these
    owners for each layer, or the initial ones; moves are cheap."""
    config, layout = configure(case)
    if case.ep == 1:
        return config, layout
    path = Path(folder, f"pool_{case.ep}.json")
    begin = {n: ExpertMap.even(e, layout.ep) for n, e in layout.model.experts().items()}
    pool = {n: [replace(each, owners=tuple(owners) or each.owners)] for n, each in begin.items()}
    write_pools(path, pool)
    settings = config.model_dump()
    settings["experts"] |= {
        "rebalance": "migrate",
        "rebalance_pool": str(path),
        "rebalance_every": every,
    }
    settings["plan"]["peak_tflops"] = SLOW
    config = Config.model_validate(settings)
    return resolve(config, case.world, case.vocab, measure=BY_UNITS)


def begun(mesh: ParallelMesh, case: Case, folder: str, every: int = 1) -> TrainStep:
    """Build a case whose experts migrate, with the first weights of the reference."""
    config, layout = with_policy(case, folder, every)
    step = TrainStep(config, layout, mesh, document_end=END)
    params = reference.init_random(config.model, seed=3)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    step.routing.read_weights(HeldWeights(params))
    return step


def run_moving(world: World, case: Case, every: int = 1, device: str = "cpu") -> Outcome:
    """Train a case whose experts change owners every `every` steps."""
    with tempfile.TemporaryDirectory() as folder, by_draw():
        step = begun(world.mesh(case.grid, device), case, folder, every)
        return train(step, case, validate=True)
