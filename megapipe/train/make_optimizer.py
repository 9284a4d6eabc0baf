"""The optimizer of a process: buckets of its stages, and where their states live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.assembly.expert_places import make_places
from megapipe.optim.buffers import make_buckets
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.state_store import StatePolicy
from megapipe.optim.velocity import decay
from megapipe.schedule.streams.stream import mean_staleness, moved_back

if TYPE_CHECKING:
    from megapipe.train.step import TrainStep


def make_optimizer(step: TrainStep) -> Optimizer:
    """The optimizer of the stages of `step`, whose parameters get their storage."""
    placement, run = step.placement, step.config.run
    buckets = make_buckets(
        step.modules,
        step.mesh,
        step.policy,
        holders=[placement.holders(stage) for stage in range(placement.stages)],
        in_process=step.pipeline.in_process,
        linked=step.layout.links_tied,
        copies=step.config.experts.slots > 0,
    )
    places = make_places(step.config, step.modules)
    states = StatePolicy.of(
        step.config.optimizer, run.seed, Path(run.folder) / run.name, step.mesh.device
    )
    velocity, staleness = {}, {}
    if step.layout.stream is not None:
        states = replace(states, apart=True)
        correction = step.config.pipeline.correction
        back = moved_back(step.layout.stream)
        velocity = {stage: decay(correction, updates) for stage, updates in back.items()}
        behind = mean_staleness(step.layout.stream)
        staleness = {stage: float(updates) for stage, updates in behind.items()}
        staleness[placement.stages] = staleness[0]  # the tied embedding's
    return Optimizer(
        buckets,
        step.config.optimizer,
        step.mesh,
        placement.stages,
        states=states,
        kernel=step.kernels.adam,
        velocity=velocity,
        staleness=staleness,
        places=places,
    )
