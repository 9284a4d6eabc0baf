"""Where a run is, as the manifest of a checkpoint has it."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megapipe.checkpoint.manifest import Count, first_problem
from megapipe.checkpoint.reader import Checkpoint
from megapipe.errors import CheckpointError


class ResumePoint(BaseModel):
    """Where a run is, by its checkpoint. Other keys are of members of the run's state
    (:class:`~megapipe.checkpoint.stateful.Stateful`), or of a later version."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    updates: Count
    lr: float = Field(0.0, ge=0)
    """Learning rate of the last update; 0 where a checkpoint does not say."""
    samples: Count
    """Taken so far."""
    order: str = ""
    """Names the order of the samples."""
    threads: Count = 0
    """Threads of a process; 0 where a checkpoint does not say."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ResumePoint:
        """Read the coordinates of a checkpoint. Raises :class:`CheckpointError`."""
        stored = {"updates": checkpoint.step, **checkpoint.manifest.coordinates}
        try:
            return cls.model_validate_json(json.dumps(stored))
        except ValidationError as error:
            problem = f"coordinates.{first_problem(error)}"
            raise CheckpointError(f"{checkpoint.path}: {problem}") from None
