"""Where a run is, as the manifest of a checkpoint has it."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PlainValidator, ValidationError

from megapipe.checkpoint.manifest import Count, first_problem
from megapipe.checkpoint.reader import Checkpoint
from megapipe.errors import CheckpointError
from megapipe.left_out import LeftOut


class Coordinates(BaseModel):
    """Where a run is, by its checkpoint. Unknown keys, as of a later version, are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    updates: Count
    lr: float = Field(0.0, ge=0)
    """Learning rate of the last update; 0 where a checkpoint does not say."""
    samples: Count
    """Taken so far."""
    left_out: Annotated[LeftOut, PlainValidator(LeftOut.stored)] = LeftOut()
    """Samples that the run does not take."""
    order: str = ""
    """Names the order of the samples."""
    loss_scale: dict[str, float] = {}
    """The state of :class:`~megapipe.optim.scaler.LossScaler`."""
    judged: dict[str, JsonValue] = {}
    """The state of :class:`~megapipe.train.judge.Judge`."""
    threads: Count = 0
    """Threads of a process; 0 where a checkpoint does not say."""
    owners: dict[str, list[Count]] = {}
    """For experts that have moved, by layer the rank that owned each."""
    stream: str = ""
    """Names the stream that was trained by; empty: training was synchronous."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Coordinates:
        """Read the coordinates of a checkpoint. Raises :class:`CheckpointError`."""
        stored = {"updates": checkpoint.step, **checkpoint.manifest.coordinates}
        try:
            return cls.model_validate_json(json.dumps(stored))
        except ValidationError as error:
            problem = f"coordinates.{first_problem(error)}"
            raise CheckpointError(f"{checkpoint.path}: {problem}") from None

    def left_out_with(self, more: LeftOut) -> LeftOut:
        """Return all that a run leaves out which goes on: `more` as far as it is not behind."""
        return self.left_out.with_(more.since(self.left_out.number(self.samples)))
