"""Records of a run, and the interface of the sinks that receive them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megapipe.observe.routing_record import RoutingRecord


@dataclass(frozen=True)
class SourceRecord:
    """Figures of one source of a mixture in a step."""

    loss: float
    """Mean loss of the source's unmasked tokens, in nats per token; nan without such tokens, or if
    a user-defined loss does not report losses per source."""
    tokens: int
    """Number of the source's unmasked tokens in the step."""
    samples: int
    """Number of samples drawn from the source since step 0."""


@dataclass(frozen=True)
class StepRecord:
    """Figures of one optimizer step of the whole job."""

    step: int
    """Number of the completed step, counted from 1."""
    steps: int
    """Number of steps of the whole run."""
    loss: float
    """Mean loss of the step's unmasked tokens, in nats per token."""
    lr: float
    """Learning rate of the step."""
    grad_norm: float
    """Global gradient norm before clipping."""
    seconds: float
    """Wall-clock time of the step."""
    tokens: int
    """Number of tokens in the step's global batch."""
    tokens_per_second: float
    """Tokens per second of the whole job."""
    tflops_per_device: float | None
    """Model TFLOP/s of one device; None if FLOPs are not counted."""
    mfu: float | None
    """Model FLOP/s as a fraction of the device's peak, 0 to 1; None if the peak is unknown."""
    memory_gib: float | None
    """Memory in use on the rank with the highest use, in GiB (:mod:`megapipe.observe.memory`)."""
    eta_seconds: float
    """Expected seconds to the end of the run."""
    samples: int
    """Number of samples consumed since step 0."""
    loss_scale: float | None = None
    """Loss scale of the backward; None without loss scaling."""
    skipped_steps: int | None = None
    """Number of steps skipped since step 0 for non-finite gradients; None if none can be
    skipped."""
    sources: Mapping[str, SourceRecord] | None = None
    """Figures of each source of a mixture, by name; None with a single source."""
    routing: RoutingRecord | None = None
    """Routing figures of the step; None without MoE layers."""
    straggler_rank: int | None = None
    """Rank that takes longest for its work, relative to the other ranks; only in the last step of a
    timing window (``log.straggler_window``)."""
    straggler_score: float | None = None
    """Ratio of the straggler's time to the other ranks' time (:mod:`megapipe.watch.stragglers`)."""

    def metrics(self) -> dict[str, float]:
        """Return all known values, by their names in tensorboard and Weights & Biases."""
        named = {
            "train/loss": self.loss,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/samples": self.samples,
            "train/loss_scale": self.loss_scale,
            "train/skipped_steps": self.skipped_steps,
            "speed/step_seconds": self.seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/tflops_per_device": self.tflops_per_device,
            "speed/mfu": self.mfu,
            "memory/gib": self.memory_gib,
            "straggler/rank": self.straggler_rank,
            "straggler/score": self.straggler_score,
        }
        if self.routing is not None:
            named |= self.routing.named()
        for name, source in (self.sources or {}).items():
            if not math.isnan(source.loss):
                named[f"source/{name}/loss"] = source.loss
            named[f"source/{name}/tokens"] = source.tokens
            named[f"source/{name}/samples"] = source.samples
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class ValidationRecord:
    """Result of one pass over a set of held-out samples."""

    step: int
    """Number of optimizer steps before the validation."""
    steps: int
    """Number of steps of the whole run."""
    loss: float
    """Mean loss of the unmasked tokens, in nats per token."""
    seconds: float
    """Wall-clock time of the pass."""
    name: str = ""
    """Name of the held-out set; "" if it has none."""
    split: str = "validation"
    """"validation", or "test" for the evaluation after the last step."""

    @property
    def metric(self) -> str:
        """Name of the loss in tensorboard and Weights & Biases."""
        return f"{self.split}/{self.name}/loss" if self.name else f"{self.split}/loss"

    @property
    def label(self) -> str:
        """Split and name of the held-out set, for messages."""
        return " ".join(filter(None, (self.split, self.name)))


class Sink(Protocol):
    """Destination of records. An error in a sink never stops the training."""

    name: str

    def step(self, record: StepRecord) -> None:
        """Receive the record of one optimizer step."""

    def validation(self, record: ValidationRecord) -> None:
        """Receive the record of one validation."""

    def note(self, text: str) -> None:
        """Receive a line of text, e.g. about a checkpoint or a resumption, or a warning."""

    def close(self) -> None:
        """Write buffered output."""


def finite_fields(record: StepRecord | ValidationRecord) -> dict[str, Any]:
    """Return the fields of a record, with None for the values that JSON lacks (nan, inf)."""
    return {name: _finite(value) for name, value in asdict(record).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
