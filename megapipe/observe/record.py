"""Records of a run, and the interface of the sinks that they are reported to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megapipe.observe.routing_record import RoutingRecord


@dataclass(frozen=True)
class SourceRecord:
    """A source of a mixture in a step."""

    loss: float
    """Mean loss of its unmasked tokens, in nats per token; nan where there are none, or where a
    loss of the user's does not tell."""
    tokens: int
    """Its unmasked tokens in the step."""
    samples: int
    """Samples of it since step 0."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as seen by the whole job."""

    step: int
    """The step just done, counted from 1."""
    steps: int
    """Steps of the whole run."""
    loss: float
    """Mean loss of the step's unmasked tokens, in nats per token."""
    lr: float
    """Learning rate that the step used."""
    grad_norm: float
    """Global gradient norm ahead of clipping."""
    seconds: float
    """Wall-clock time of the step."""
    tokens: int
    """Tokens of the step's global batch."""
    tokens_per_second: float
    """Tokens per second of the whole job."""
    tflops_per_device: float | None
    """Model TFLOP/s of one device; None where FLOPs are not counted."""
    mfu: float | None
    """Share of the device's peak, 0 to 1; None where no peak is known."""
    memory_gib: float | None
    """Memory of the fullest rank, in GiB; see :mod:`megapipe.observe.memory`."""
    eta_seconds: float
    """Expected time to the end of the run."""
    samples: int
    """Samples consumed since step 0."""
    loss_scale: float | None = None
    """Factor of the loss in the backward pass; None where there is none."""
    skipped: int | None = None
    """Steps since step 0 without an update, their gradients not finite; None where none can be."""
    sources: Mapping[str, SourceRecord] | None = None
    """Of a mixture: each source by name; None where there is but one."""
    routing: RoutingRecord | None = None
    """None where no layer routes its tokens."""
    slowest_rank: int | None = None
    """At the end of a window (``log.stragglers_every``): the rank that takes the longest for its
    work, by how long others take..."""
    slowest_score: float | None = None
    """... and how many times as long; see :mod:`megapipe.watch.stragglers`."""

    def metrics(self) -> dict[str, float]:
        """The known values under the names that tensorboard and Weights & Biases show."""
        named = {
            "train/loss": self.loss,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/samples": self.samples,
            "train/loss_scale": self.loss_scale,
            "train/skipped": self.skipped,
            "speed/step_seconds": self.seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/tflops_per_device": self.tflops_per_device,
            "speed/mfu": self.mfu,
            "memory/gib": self.memory_gib,
            "slowest/rank": self.slowest_rank,
            "slowest/score": self.slowest_score,
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
    """One pass over the held-out samples."""

    step: int
    """Optimizer steps done before it."""
    steps: int
    """Steps of the whole run."""
    loss: float
    """Mean loss of the unmasked tokens, in nats per token."""
    seconds: float
    """Wall-clock time of the pass."""
    name: str = ""
    """Of the set, where it has one."""
    split: str = "validation"
    """validation, or test: that of after the last step."""

    @property
    def metric(self) -> str:
        """The name of the loss in tensorboard and Weights & Biases."""
        return f"{self.split}/{self.name}/loss" if self.name else f"{self.split}/loss"

    @property
    def label(self) -> str:
        """The set in words."""
        return " ".join(filter(None, (self.split, self.name)))


class Sink(Protocol):
    """A place that records go to. What a sink raises never stops the training."""

    name: str

    def step(self, record: StepRecord) -> None:
        """Take the record of one optimizer step."""

    def validation(self, record: ValidationRecord) -> None:
        """Take the record of one validation."""

    def note(self, text: str) -> None:
        """Take a line of text: a checkpoint, a resumption, a warning."""

    def close(self) -> None:
        """Write out what is still held."""


def finite_fields(record: StepRecord | ValidationRecord) -> dict[str, Any]:
    """The fields of a record, with None for what JSON cannot express (nan, inf)."""
    return {name: _finite(value) for name, value in asdict(record).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
