"""The section `health` of the configuration: policies for anomalies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs

Action = Literal["stop", "skip", "rewind"]


def _rising(pair: list[int]) -> list[int]:
    if pair[0] >= pair[1]:
        raise ValueError("a first number below the second")
    return pair


_Range = Annotated[
    list[Annotated[int, Field(ge=0)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_rising),
]


def _action(action: Action) -> Needs:
    return Needs(
        f"health.non_finite={action}, or health.spike={action} with health.spike_factor",
        lambda config: action in config.health.actions,
    )


JUDGES, REWINDS = needs("health.spike_factor"), _action("rewind")


class HealthConfig(Section):
    """Policies for anomalies: losses and gradients that cannot be right (docs/reliability.md)."""

    non_finite: Action = "stop"
    """Action on a loss or gradients that are not finite, unless a smaller fp16 loss scale helps.
    stop: the run ends before the update, with exit code 6. skip: the step makes no update. rewind:
    the run goes back to its newest intact checkpoint, skips the samples of the step, and continues.
    If an update has made weights or optimizer states non-finite, skip cannot help, so the run
    stops."""
    spike_factor: float | None = Field(None, gt=0)
    """Spike threshold. A finite loss or gradient norm is a spike if it exceeds the median of the
    last `spike_window` steps by more than this many standard deviations (computed from the median
    absolute deviation, at least a hundredth of the median). Default: no spikes."""
    spike_window: Annotated[int, JUDGES] = Field(100, ge=4)
    """Number of earlier steps with which a loss or gradient norm is compared. Comparisons begin
    after that many steps; skipped steps do not count."""
    spike: Annotated[Action, JUDGES] = "rewind"
    """Action on a spike: stop, skip or rewind, as for `non_finite`."""
    max_consecutive_skips: Annotated[int, _action("skip")] = Field(10, ge=1)
    """Maximum number of consecutive skipped steps; one more ends the run."""
    max_rewinds: Annotated[int, REWINDS] = Field(3, ge=1)
    """Maximum number of rewinds to the same checkpoint within one start; one more ends the run.
    Exception: if the step after the checkpoint was never finite, the checkpoint is given up, and an
    older one is used. At most this many checkpoints are given up in a row, over all starts; the
    count begins anew when finite steps follow a newer checkpoint."""
    rewind_skip_batches: Annotated[int, REWINDS] = Field(1, ge=1)
    """Number of global batches that a rewind skips: the batch of the bad step and the batches
    before it, at most back to the checkpoint."""
    skip_samples: Annotated[
        list[_Range],
        ExpectedText("pairs of sample numbers, as in [[640, 672]]; the second number is excluded"),
    ] = Field(default_factory=list)
    """Ranges of samples that no step takes, by their numbers in the run: [[640, 672]] skips 640 to
    671. A rewind prints its skipped samples in this form, so that a new run can take the same
    steps. Samples that a resumed run has already consumed are not changed."""

    replay: Annotated[bool, OnResume.HARMLESS] = True
    """Replay a step that is not finite, or has a spike, with the same weights, samples and seeds.
    An equal result is persistent, and the configured action follows. If the second result is not an
    anomaly, the first was a transient device fault: a line is printed, and the second is used."""
    replay_every: Annotated[int, OnResume.HARMLESS] = Field(0, ge=0)
    """Steps between replays of steps without an anomaly. The results of the step and its replay are
    compared bitwise. If they differ, the step is computed a third time, and the result that came
    twice is used. On CUDA it needs `run.deterministic`. 0: none."""
    replica_check_every: Annotated[int, OnResume.HARMLESS] = Field(0, ge=0)
    """Steps between comparisons of values that several ranks hold: weights of data-parallel
    replicas, of holders of a stage or a tied embedding, of tensor-parallel ranks and of expert
    replicas, and unsharded optimizer states. If values differ, the run ends with exit code 9 before
    the step is validated or saved. A comparison also precedes every checkpoint. 0: none."""

    @property
    def actions(self) -> set[Action]:
        """Set of the actions that an anomaly can cause under these settings: stop, skip, rewind."""
        return {self.non_finite} if self.spike_factor is None else {self.non_finite, self.spike}

    @property
    def skips(self) -> bool:
        """Whether steps may be skipped, that is, make no update."""
        return "skip" in self.actions
