"""The objects with which a process computes, built once: stages, pipeline, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megapipe.assembly.sharding import make_sharding
from megapipe.assembly.stage import make_stage
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.executor import Executor
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.stage import Stage
from megapipe.errors import ScheduleError
from megapipe.layers.parameter import TORCH_DTYPES, LocalParameter, release_initial
from megapipe.layout.layout import Layout
from megapipe.model.interface import StageModule
from megapipe.ops.kernels import Kernels
from megapipe.optim.optimizer import Optimizer
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.train.kernel_selection import agreed_kernels
from megapipe.train.messages import MessageShapes, receive_ahead
from megapipe.train.step.make_optimizer import make_optimizer

Initial = Callable[[LocalParameter, Tensor], None]
"""Function that writes the initial weights of a region of a global tensor."""


@dataclass(frozen=True)
class Machine:
    """The stages of a process, its channels to neighbouring stages, and its optimizer."""

    config: Config
    layout: Layout
    mesh: ParallelMesh
    schedule: Schedule
    """Schedule that training begins with."""
    kernels: Kernels
    messages: MessageShapes
    pipeline: Pipeline
    modules: Mapping[int, StageModule]
    """Modules by stage number."""
    stages: Mapping[int, Stage]
    """Stages by number."""
    optimizer: Optimizer

    @property
    def placement(self) -> Placement:
        """Map from stages to pipeline ranks, equal in all schedules of a run."""
        return self.schedule.placement

    @property
    def last(self) -> Stage | None:
        """Last stage of the pipeline, if this process has it."""
        return self.stages.get(self.placement.stages - 1)

    def executors(
        self, schedule: Schedule, *, train: bool, record: bool = False, name: bool = False
    ) -> list[Executor]:
        """Make executors of `schedule`, one for each pipeline rank of this process."""
        layout = self.layout
        return self.pipeline.executors(
            schedule,
            self.stages,
            self.optimizer,
            train=train,
            proved=schedule is layout.schedule or schedule in layout.ramp_schedules.values(),
            record=record,
            name=name,
            speculate=train and self.config.optimizer.post_validation,
        )


def build_machine(
    config: Config,
    layout: Layout,
    mesh: ParallelMesh,
    *,
    schedule: Schedule | None = None,
    kernels: Kernels | None = None,
    initial: Initial | None = None,
) -> Machine:
    """Build the stages, the pipeline and the optimizer of this process. Collective.

    `schedule` replaces the configured one, `kernels` those of
    :func:`~megapipe.train.kernel_selection.agreed_kernels`, and `initial` the weights drawn from
    ``run.seed``. Raises :class:`ScheduleError` for a schedule that does not fit `layout`.
    """
    schedule = schedule or layout.schedule
    check_schedule(schedule, layout)
    kernels = kernels or agreed_kernels(config, layout, mesh, schedule)
    messages = MessageShapes(layout, config.train)
    pipeline = Pipeline(
        mesh,
        schedule.placement,
        layout.replicas,
        shape_of=messages.of_schedule,
        dtype=TORCH_DTYPES[config.model.dtype],
        in_process=layout.in_process,
        scatter=layout.scatters,
        packed=layout.sends_tuples,
        debug=config.pipeline.debug,
        receive_ahead=receive_ahead(config, layout, mesh.device),
        ctas=config.pipeline.p2p_max_ctas,
    )
    modules = {
        stage: layout.model.build(layout.stage_layers[stage], make_sharding(config, mesh, kernels))
        for rank in pipeline.ranks
        for stage in schedule.placement.stages_of(rank)
    }
    optimizer = make_optimizer(config, layout, mesh, schedule, modules, kernels)
    stages = {
        stage: make_stage(
            layout, module, layout.block_policies[stage], recompute=stage in schedule.recompute
        )
        for stage, module in modules.items()
    }
    for stage in stages.values():
        stage.module.to(mesh.device)  # moves buffers; parameters are there already
        stage.route_autograd_grads()
    seed = config.run.seed
    optimizer.set_weights(initial or (lambda spec, out: spec.initialise(out, seed)))
    for module in modules.values():
        release_initial(module.parameters())
    return Machine(
        config, layout, mesh, schedule, kernels, messages, pipeline, modules, stages, optimizer
    )


def check_schedule(schedule: Schedule, layout: Layout) -> None:
    """Refuse a schedule that differs from the layout in ranks, stages or micro-batches."""
    placement, whole = schedule.placement, schedule.whole_microbatches
    sizes = (placement.ranks, placement.stages) == (layout.pp, layout.stages)
    counts = [layout.microbatches, *(s.whole_microbatches for s in layout.ramp_schedules.values())]
    if not sizes or whole not in counts:
        raise ScheduleError(
            f"schedule {schedule.name} has {placement.ranks} ranks, {placement.stages} stages and "
            f"{whole} micro-batches; the layout needs {layout.pp}, {layout.stages} and "
            f"{layout.microbatches}"
        )
