"""The section `numbers` of the configuration: policies for numbers that cannot be right."""

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
        f"numbers.non_finite={action}, or numbers.spike={action} with numbers.spike_factor",
        lambda config: action in config.numbers.actions,
    )


JUDGES, REWINDS = needs("numbers.spike_factor"), _action("rewind")


class NumbersConfig(Section):
    """Policies for numbers that cannot be right (docs/reliability.md)."""

    non_finite: Action = "stop"
    """A loss or gradients that are not finite, which a smaller loss scale of fp16 does not mend.
    stop: the run ends before the update, with exit code 6. skip: the step is made without an
    update. rewind: the run goes back to its newest intact checkpoint, leaves the samples of the
    step out, and goes on. Weights and optimizer states that an update has left not finite are
    beyond skip: it stops."""
    spike_factor: float | None = Field(None, gt=0)
    """A finite loss or gradient norm is a spike if it is above the median of the last
    `spike_window` by more than so many standard deviations, by their median absolute deviation, and
    of a hundredth of the median at least. Default: nothing is."""
    spike_window: Annotated[int, JUDGES] = Field(100, ge=4)
    """Steps that a loss or a gradient norm is compared with. Until there are as many, and for those
    that were skipped, nothing is."""
    spike: Annotated[Action, JUDGES] = "rewind"
    """Stop, skip or rewind at a spike, as for `non_finite`."""
    most_skipped: Annotated[int, _action("skip")] = Field(10, ge=1)
    """Steps in a row that skip makes without an update; one more ends the run."""
    rewinds: Annotated[int, REWINDS] = Field(3, ge=1)
    """Most times that a start of the run goes back to the same checkpoint; once more ends it, but
    where numbers were never finite in the step that follows: then that checkpoint is given up, and
    an older one is taken. Also most checkpoints that are given up, over all starts, before a newer
    one has been followed by finite steps; once more ends the run."""
    leave_out: Annotated[int, REWINDS] = Field(1, ge=1)
    """Batches that a rewind leaves out: that of the step, and those before it, as far as the
    checkpoint."""
    skip_samples: Annotated[
        list[_Range],
        ExpectedText("pairs of sample numbers, as in [[640, 672]]; the second is not in"),
    ] = Field(default_factory=list)
    """Samples that no step takes, by their numbers in the run: [[640, 672]] leaves out 640 to 671.
    What a rewind has left out is told in this form: with it a new run takes the same steps. Of a
    run that goes on, samples that are behind it stay as they were."""

    rerun: Annotated[bool, OnResume.HARMLESS] = True
    """Compute a step that is not finite, or has a spike, a second time before anything is done
    about it, from the same weights, samples and seeds. The same result again is persistent, and the
    above applies; if the second result is sound, the first was a transient fault of a device: that
    is told, and the second is used."""
    rerun_every: Annotated[int, OnResume.HARMLESS] = Field(0, ge=0)
    """Steps between steps that are computed twice though nothing is wrong with them, and compared
    to the bit; where they differ a third time, and what came twice is used. On CUDA it takes
    `run.deterministic`. 0: none."""
    check_copies_every: Annotated[int, OnResume.HARMLESS] = Field(0, ge=0)
    """Steps between comparisons of what several ranks hold: weights of replicas, of holders of a
    stage or a tied embedding, of tensor-parallel ranks and of experts with copies, and optimizer
    states where they are not sharded. Where copies differ, the run ends with exit code 9 before the
    step is validated or saved. Every checkpoint is preceded by one as well. 0: none."""

    @property
    def actions(self) -> set[Action]:
        """All that may be done about a step."""
        return {self.non_finite} if self.spike_factor is None else {self.non_finite, self.spike}

    @property
    def skips(self) -> bool:
        """Whether steps may be made without an update."""
        return "skip" in self.actions
