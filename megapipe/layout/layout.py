"""What several keys of a configuration decide together, worked out once."""

from dataclasses import dataclass, field

from megapipe.layers.policy import Unit
from megapipe.model.partition import StageSpec
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Schedule


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh and of the pipeline, and what each stage holds."""

    dp: int
    tp: int
    pp: int
    cp: int
    microbatches: int
    """Whole micro-batches per step and data-parallel replica."""
    world: int
    """Processes of the job; with in-process channels the pipeline ranks share one."""
    stage_layers: tuple[StageSpec, ...]
    slice_lengths: tuple[int, ...]
    """Positions of each slice of a sequence; one where the schedule does not cut them."""
    schedule: Schedule = field(repr=False)
    units: tuple[tuple[Unit, ...], ...] = field(repr=False)
    """What the blocks of each stage keep for their backward."""
    cost: Cost = field(repr=False)
    """What the operations of each stage cost, in FLOPs per token; messages cost nothing."""

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return len(self.stage_layers)

    @property
    def chunks(self) -> int:
        """Virtual stages per pipeline rank, rounded up."""
        return -(-self.stages // self.pp)
