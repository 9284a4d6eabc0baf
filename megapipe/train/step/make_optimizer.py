"""Construction of a process's optimizer: buckets of its stages, and storage of their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megapipe.assembly.moe.replicas import attach_expert_replicas
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.model.interface import StageModule
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import make_buckets
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.state_store import StatePolicy
from megapipe.optim.velocity import decay
from megapipe.schedule.async_schedules.async_schedule import mean_staleness, moved_back
from megapipe.schedule.ir import Schedule


def make_optimizer(
    config: Config,
    layout: Layout,
    mesh: ParallelMesh,
    schedule: Schedule,
    modules: Mapping[int, StageModule],
    kernels: Kernels,
) -> Optimizer:
    """Make the optimizer of the stages `modules`, whose parameters get memory in buckets. Training
    begins with `schedule`, whose placement may differ from the layout's."""
    run, stages = config.run, schedule.placement.stages
    plans = process_buckets(config, replace(layout, schedule=schedule), mesh.at.pp)
    buckets = make_buckets(plans, modules, mesh)
    replicas = attach_expert_replicas(config, modules)
    states = StatePolicy.of(config.optimizer, run.seed, Path(run.folder) / run.name, mesh.device)
    velocity, staleness = {}, {}
    if layout.async_schedule is not None:
        states = replace(states, separate_masters=True)
        correction = config.pipeline.velocity_decay
        back = moved_back(layout.async_schedule)
        velocity = {stage: decay(correction, updates) for stage, updates in back.items()}
        behind = mean_staleness(layout.async_schedule)
        staleness = {stage: float(updates) for stage, updates in behind.items()}
        staleness[stages] = staleness[0]  # the tied embedding's
    return Optimizer(
        buckets,
        config.optimizer,
        mesh,
        stages,
        states=states,
        kernel=kernels.adam,
        velocity=velocity,
        staleness=staleness,
        replicas=replicas,
    )
