"""The global batch of each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.cli import parse
from megapipe.config.batch_ramp import BatchRamp
from megapipe.errors import ConfigError, ScheduleError
from megapipe.layout.resolve import resolve
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


def picky(ranks: int, microbatches: int) -> Schedule:
    if microbatches % 8:
        raise ScheduleError("expected a multiple of 8 micro-batches")
    return gpipe_on(loop(ranks), microbatches)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 500), st.integers(0, 80)
)
def test_batches_grow_by_shares_of_the_samples(
    start: int, increment: int, rises: int, samples: int, steps: int
) -> None:
    """The rule of Megatron-LM's --rampup-batch-size, one step after the other."""
    final = start + increment * rises
    ramp, consumed = BatchRamp(final, [start, increment, samples]), 0
    for step in range(steps):
        assert ramp.after(0, step) == consumed
        if consumed > samples:
            expected = final
        else:
            expected = start + int(consumed / (samples / rises)) * increment
        assert ramp.batch_at(consumed) == expected
        assert ramp.after(consumed, 1) == consumed + expected
        consumed += expected
    assert ramp.sizes == tuple(range(start, final + 1, increment))


def test_without_a_ramp_all_are_equal() -> None:
    ramp = BatchRamp(12)
    assert (ramp.sizes, ramp.batch_at(0), ramp.after(5, 3)) == ((12,), 12, 41)
    assert BatchRamp(10, [2, 4, 100]).after(0, 10**12) == pytest.approx(10**13, rel=1e-9)


def test_each_batch_has_a_schedule_that_is_proved() -> None:
    given = ["parallel.pp=2", "train.microbatch=2", "train.global_batch=16"]
    _, layout = resolve(parse([*given, "train.batch_ramp=[4, 6, 100]"]).config, 2, 257)
    assert {batch: s.microbatches for batch, s in layout.ramp_schedules.items()} == {4: 2, 10: 5}
    assert layout.schedule.microbatches == 8
    assert resolve(parse(given).config, 2, 257)[1].ramp_schedules == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["train.batch_ramp=[4, 5, 100]"],
            "steps of 5 do not lead from 4 to train.global_batch=",
        ),
        (["train.batch_ramp=[16, 4, 100]"], "steps of 4 do not lead from 16 to train.global_batch"),
        (
            ["train.batch_ramp=[4, 3, 100]", "train.microbatch=2"],
            "increment 3 is not divisible by train.microbatch x dp = 2: expected a multiple",
        ),
        (
            ["train.batch_ramp=[1, 3, 100]", "train.microbatch=2", "train.global_batch=16"],
            "start 1 is not divisible by train.microbatch x dp = 2",
        ),
        (
            [
                *("train.batch_ramp=[6, 10, 100]", "train.microbatch=1", "parallel.pp=2"),
                f"pipeline.schedule={__name__}:picky",
            ],
            f"train.batch_ramp: a batch of 6 samples: pipeline.schedule={__name__}:picky: ",
        ),
        (
            ["train.batch_ramp=[4, 4, 100]", "train.microbatch=1", "pipeline.schedule=auto"],
            "pipeline.schedule=auto searches an order for one number of micro-batches: expected",
        ),
        (
            ["train.batch_ramp=[4, 4]"],
            "expected start, increment and samples, as in [16, 8",
        ),
        (["train.batch_ramp=[0, 4, 9]"], "expected start, increment and samples"),
        (["train.batch_ramp=[4, 4, 1.5]"], "expected start, increment and samples"),
    ],
)
def test_ramps_that_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(parse(["train.global_batch=16", *given]).config, None, 257)
    assert words in str(caught.value)
