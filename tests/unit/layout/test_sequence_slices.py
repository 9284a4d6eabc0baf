"""How a configuration has sequences cut: terapipe by modelled times, the others evenly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.costs import relative_cost, stage_work
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.sequence_slices import check_timeable, slice_time
from megapipe.layout.speeds import Speeds
from megapipe.plan.report import report
from megapipe.plan.step_time import simulate_step
from megapipe.plan.units import Units
from megapipe.schedule.cost import Time
from megapipe.schedule.generators import build
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts

LENGTH = 8
BASE = (
    "model.layers=4",
    "model.heads=4",
    "model.hidden=16",
    "train.microbatch=1",
    "pipeline.schedule=terapipe",
)


def configure(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*BASE, f"train.sequence_length={LENGTH}", *keys]).config, None, 257)


def all_cuts(count: int | None, multiple: int = 1) -> Iterator[tuple[int, ...]]:
    places = range(multiple, LENGTH, multiple)
    for number in range(1, LENGTH // multiple + 1) if count is None else [count]:
        for inner in combinations(places, number - 1):
            yield tuple(b - a for a, b in pairwise((0, *inner, LENGTH)))


def makespan(config: Config, layout: Layout, cut: tuple[int, ...], *, equal: bool) -> Time:
    """Return terapipe's time with this cut, by the plan's costs or by those of `equal` stages."""
    work = stage_work(layout.model, layout.stage_layers, layout.block_policies, ())
    if equal:
        work = (work[0],) * len(work)
    schedule = build("terapipe", ranks=layout.pp, microbatches=layout.microbatches, slices=len(cut))
    return simulate(schedule, relative_cost(config, layout.model, work, cut)).makespan


@in_parts("ranks", [2, 3, 4], full=[3])
@in_parts("microbatches", [1, 2, 5], default=[2], full=[1])
@pytest.mark.parametrize("count", [None, 3])
def test_the_simulator_finds_no_faster_cut(
    ranks: int, microbatches: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cuts tried, on stages that take equally long, from where one slice is best to where
    every token is one."""
    work_of = stage_work

    def equal_work(*args: object, **more: bool) -> object:
        work = work_of(*args, **more)  # type: ignore[arg-type]
        return (work[0],) * len(work)

    monkeypatch.setattr("megapipe.layout.resolve.stage_work", equal_work)
    numbers = set()
    for overhead in ("0", "0.3", "1", "2.5", "20"):
        for attention in ("0", "1", "40"):
            config, layout = configure(
                f"parallel.pp={ranks}",
                f"train.global_batch={microbatches}",
                f"pipeline.sequence_slices={count or 'null'}",
                f"pipeline.options.slice_overhead_tokens={overhead}",
                f"pipeline.slice_attention_cost={attention}",
            )
            cut = layout.slice_lengths
            numbers.add(len(cut))
            assert layout.schedule == build(
                "terapipe", ranks=ranks, microbatches=microbatches, slices=len(cut)
            )
            found = simulate(layout.schedule, layout.cost).makespan
            assert found == makespan(config, layout, cut, equal=True)
            assert found == min(
                makespan(config, layout, other, equal=True) for other in all_cuts(count)
            )
    assert numbers == {3} if count else {1, LENGTH} <= numbers


def test_what_is_minimised_is_what_the_paper_says() -> None:
    """m sum t + (p-1) max t, in forwards and backwards of a stage."""
    config, layout = configure(
        "parallel.pp=3", "train.global_batch=2", "pipeline.options.slice_overhead_tokens=1.5"
    )
    work = stage_work(layout.model, layout.stage_layers, layout.block_policies, ())[0]
    for cut in all_cuts(None):
        shares = slice_time(config, layout.model).shares(cut)
        formula = (work.F + work.I + work.W) * (2 * sum(shares) + 2 * max(shares))
        assert makespan(config, layout, cut, equal=True) == formula


@in_parts("vocabulary", [257, 3000, 60000], default=2, full=1)
@in_parts("ranks", [2, 4], default=[2], full=1)
def test_of_stages_that_differ_the_slowest_counts(ranks: int, vocabulary: int) -> None:
    """The head is a stage's worth, or many: the more it is, the less other stages wait for. The
    best of all cuts is found to within a tenth, where equal stages would cost half more."""
    for microbatches in (1, 2, 4):
        config, layout = configure(
            f"parallel.pp={ranks}",
            f"train.global_batch={microbatches}",
            f"model.vocab_size={vocabulary}",
            "pipeline.options.slice_overhead_tokens=3",
        )
        best = min(makespan(config, layout, cut, equal=False) for cut in all_cuts(None))
        assert simulate(layout.schedule, layout.cost).makespan <= 1.1 * best
    if vocabulary == 60000:
        assert len(layout.slice_lengths) == 1


def test_the_plan_is_drawn_by_the_times_of_the_cut() -> None:
    keys = ("parallel.pp=2", "train.global_batch=1", "pipeline.options.slice_overhead_tokens=1")
    config, layout = configure(*keys, "pipeline.slice_attention_cost=30")
    assert len(layout.slice_lengths) > 1
    shares = slice_time(config, layout.model).shares(layout.slice_lengths)
    assert layout.cost.slices == shares
    timeline = simulate_step(Units(config, layout), Speeds.of(config))
    ends, starts = timeline.ends[0], timeline.starts[0]
    forwards = [ends[i] - starts[i] for i in range(len(shares))]
    F = float(forwards[0] / shares[0])
    assert forwards == pytest.approx([F * share for share in shares])
    lengths = ", ".join(map(str, layout.slice_lengths))
    told = ", ".join(f"{float(share):.1%}" for share in shares)
    assert f"of {lengths} tokens, with {told} of the time of a whole sequence" in report(
        config, layout
    )


def test_other_schedules_and_none_given_cut_evenly() -> None:
    """An overhead that all slices have moves no cut, but counts in the plan; attention does."""
    for schedule in ("seq1f1b", "interleaved_seq1f1b", "terapipe"):
        keys = (
            f"pipeline.schedule={schedule}",
            "parallel.pp=2",
            "pipeline.sequence_slices=3",
            "train.global_batch=2",
        )
        _, plain = configure(*keys)
        config, attentive = configure(*keys, "pipeline.slice_attention_cost=200")
        assert sum(plain.cost.slices or ()) == 1
        assert attentive.slice_lengths[0] > plain.slice_lengths[0]
        time = slice_time(config, attentive.model)
        longest = [max(time.shares(own.slice_lengths)) for own in (attentive, plain)]
        assert longest[0] < longest[1]
        if schedule != "terapipe":
            config, slow = configure(*keys, "pipeline.options.slice_overhead_tokens=4")
            assert slow.slice_lengths == plain.slice_lengths
            assert slow.cost.slices == slice_time(config, slow.model).shares(plain.slice_lengths)
            assert sum(slow.cost.slices) > 1.5


def test_two_slices_unless_more_are_known_to_be_better() -> None:
    keys = ("parallel.pp=4", "train.global_batch=1")
    assert len(configure(*keys)[1].slice_lengths) == 2
    assert len(configure(*keys, "pipeline.slice_attention_cost=2")[1].slice_lengths) == 2
    assert (
        len(configure(*keys, "pipeline.options.slice_overhead_tokens=0")[1].slice_lengths) == LENGTH
    )


def test_the_number_waits_for_the_vocabulary() -> None:
    """Before it is known the schedule has as many slices as are given, or two."""
    keys = [*BASE, f"train.sequence_length={LENGTH}", "data.tokenizer=some/where"]
    keys += ["parallel.pp=4", "train.global_batch=1", "pipeline.options.slice_overhead_tokens=0"]
    config, early = resolve(parse(keys).config, None, None)
    assert (len(early.slice_lengths), early.schedule.slices) == (2, 2)
    config, late = resolve(config, None, 257, before=early)
    assert len(late.slice_lengths) == late.schedule.slices == LENGTH
    assert resolve(config, None, 257, before=late) == (config, late)


def test_multiples_under_sequence_parallelism() -> None:
    keys = ("parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    keys += ("train.global_batch=1", "pipeline.options.slice_overhead_tokens=0.5")
    _, layout = configure(*keys)
    assert len(layout.slice_lengths) > 1
    assert not any(length % 2 for length in layout.slice_lengths)
    with pytest.raises(
        ConfigError, match=r"^configuration: pipeline\.sequence_slices: 5 slices of .* 1 to"
    ):
        configure(*keys, "pipeline.sequence_slices=5")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["pipeline.sequence_slices=9"],
            "pipeline.sequence_slices: 9 slices of a sequence of 8 tokens in multip",
        ),
        (
            ["pipeline.options.slice_overhead_tokens=-1"],
            "pipeline.options.slice_overhead_tokens=-1",
        ),
        (["pipeline.slice_attention_cost=-0.5"], "pipeline.slice_attention_cost=-0.5"),
        (["pipeline.options.slice_overhead_tokens=inf"], "pipeline.options.slice_overhead_tokens"),
    ],
)
def test_mistakes(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure("parallel.pp=2", "pipeline.options.slice_overhead_tokens=1", *keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_has_no_slices_to_be_timed() -> None:
    config, layout = configure("parallel.pp=2")
    check_timeable(config, layout.schedule.slices)
    with pytest.raises(ConfigError, match=r"^--time-slices: pipeline\.schedule=1f1b does not cut"):
        check_timeable(configure("pipeline.schedule=1f1b")[0], 1)
    short = config.train.model_copy(update={"sequence_length": 3})
    with pytest.raises(ConfigError, match=r"sequence_length=3 is too short: expected at least 4$"):
        check_timeable(config.model_copy(update={"train": short}), 2)


def test_resolved_twice_is_the_same() -> None:
    config, layout = configure("parallel.pp=3", "pipeline.options.slice_overhead_tokens=0.4")
    assert resolve(config, None, 257) == (config, layout)
