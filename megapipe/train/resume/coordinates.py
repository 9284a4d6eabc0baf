"""The progress of a run, as stored in the manifest of a checkpoint."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megapipe.checkpoint.manifest import Count, first_problem
from megapipe.checkpoint.reader import Checkpoint
from megapipe.errors import CheckpointError


class ResumePoint(BaseModel):
    """Progress of a run, from its checkpoint's coordinates. Other coordinates belong to members of
    the run's state (:class:`~megapipe.checkpoint.stateful.Stateful`), or to a later version."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    updates: Count
    lr: float = Field(0.0, ge=0)
    """Learning rate of the last update; 0 if it is not stored."""
    samples: Count
    """Number of samples taken so far."""
    order: str = ""
    """Name of the sample order."""
    threads: Count = 0
    """Number of threads of a process; 0 if it is not stored."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ResumePoint:
        """Read the coordinates of a checkpoint. Raises :class:`CheckpointError`."""
        stored = {"updates": checkpoint.step, **checkpoint.manifest.coordinates}
        try:
            return cls.model_validate_json(json.dumps(stored))
        except ValidationError as error:
            problem = f"coordinates.{first_problem(error)}"
            raise CheckpointError(f"{checkpoint.path}: {problem}") from None
