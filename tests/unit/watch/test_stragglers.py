"""Scores of windows that a test makes, and when a rank is named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megapipe.watch.stragglers import FIRST, UNEVEN, Score, Scorer, Stragglers, TimingWindow
from megapipe.watch.stragglers import STEPS as LEAST

STEPS = 20


def windows(
    *seconds: float, noise: float = 0.02, steps: int = STEPS, seed: int = 0
) -> list[TimingWindow]:
    """Make windows of ranks whose steps take `seconds`, each more or less by a share."""
    draw = random.Random(seed)
    return [
        TimingWindow.of([own * (1 + draw.uniform(-noise, noise)) for _ in range(steps)])
        for own in seconds
    ]


def same(count: int) -> Scorer:
    """Make the scorer of ranks that are all peers."""
    return Scorer([(0,)] * count, [1.0] * count)


def slow(scores: Sequence[Score]) -> list[int]:
    return [score.rank for score in scores if score.slow]


def values(scores: Sequence[Score]) -> list[float]:
    return [score.value for score in scores]


def test_a_window_is_its_median_and_its_median_deviation() -> None:
    assert TimingWindow.of([1.0, 2.0, 3.0, 4.0, 100.0]) == TimingWindow(3.0, 1.0, 5)
    assert TimingWindow.of([2.0]) == TimingWindow(2.0, 0.0, 1)


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ([1, 1, 1, 1, 1, 2, 1, 1], [5]),
        ([1, 2, 1, 1, 1, 1, 3, 1], [1, 6]),
        ([2, 2, 2, 2, 1, 1, 1, 1], [0, 1, 2, 3]),
        ([3] * 8, []),
        ([1, 1.2, 0.9, 1], []),
        ([1, 1.5], [1]),
        ([1, 1, 1.4], [2]),
    ],
)
def test_peers(seconds: list[float], named: list[int]) -> None:
    scores = same(len(seconds)).scores(windows(*seconds))
    assert slow(scores) == named
    assert not any(score.alone for score in scores)


def test_a_score_is_by_the_median_of_the_others() -> None:
    scores = same(4).scores(windows(1.0, 2.0, 4.0, 5.0, noise=0.0))
    assert values(scores) == [1 / 4, 2 / 4, 4 / 2, 5 / 2]
    assert [score.expected_s for score in scores] == [4.0, 4.0, 2.0, 2.0]
    assert values(same(3).scores(windows(1.0, 2.0, 2.0, noise=0.0))) == [0.5, 2 / 1.5, 2 / 1.5]
    assert values(same(2).scores(windows(1.0, 2.0, noise=0.0))) == [0.5, 2.0]


def test_work_of_peers_may_differ() -> None:
    """Mirror images may take different numbers of micro-batches."""
    scorer = Scorer([(0, 3), (1, 2), (1, 2), (0, 3)], [3.0, 2.0, 2.0, 4.0])
    assert values(scorer.scores(windows(3.0, 2.0, 2.0, 4.0, noise=0.0))) == [1.0] * 4
    assert slow(scorer.scores(windows(3.0, 2.0, 2.0, 8.0))) == [3]


def test_stages_of_several_ranks_are_not_compared() -> None:
    scorer = Scorer([(0,), (0,), (1,), (1,)], [1.0] * 4)
    assert slow(scorer.scores(windows(1.0, 1.0, 9.0, 9.0))) == []
    assert slow(scorer.scores(windows(1.0, 1.0, 9.0, 18.0))) == [3]


def alone(*work: float) -> Scorer:
    """Make the scorer of ranks with a stage each."""
    return Scorer([(stage,) for stage in range(len(work))], work)


def test_ranks_without_peers_are_compared_by_work() -> None:
    even = windows(4.0, 1.0, 1.0, 2.0)
    scores = alone(4, 1, 1, 2).scores(even)
    assert slow(scores) == []
    assert all(score.alone for score in scores)
    assert slow(alone(4, 1.5, 2, 2).scores(windows(4.0, 1.5, 5.0, 2.0))) == [2]


def test_what_stages_take_from_the_first_is_usual_for_them() -> None:
    """The last stage takes 1.4 times the time of its FLOPs: it is slow at 1.4 * 1.6, not before."""
    scorer = alone(1, 1, 1, 1)
    for seed in range(2 * FIRST):
        assert slow(scorer.scores(windows(1.0, 1.0, 0.8, 1.4, seed=seed))) == []
    assert slow(scorer.scores(windows(1.0, 1.0, 0.8, 1.4 * 1.4))) == []
    scores = scorer.scores(windows(1.0, 1.0, 0.8, 1.4 * 1.6, noise=0.0))
    assert slow(scores) == [3]
    assert scores[3].value == pytest.approx(1.6, rel=0.05)
    assert scores[3].expected_s == pytest.approx(1.4, rel=0.05)


def test_more_than_stages_can_account_for_is_slow_from_the_first() -> None:
    assert slow(alone(1, 1, 1).scores(windows(1.0, 1.0, UNEVEN * 1.4))) == []
    scorer = alone(1, 1, 1)
    for seed in range(2 * FIRST):
        assert slow(scorer.scores(windows(1.0, 1.0, UNEVEN * 1.6, seed=seed))) == [2]


def test_a_rank_that_recovers_makes_no_straggler_of_another() -> None:
    scorer = alone(1, 1)
    for seconds in [(1.0, 3.0)] * 3 + [(1.0, 1.0)] * 3:
        assert slow(scorer.scores(windows(*seconds))) in ([1], [])
    assert slow(scorer.scores(windows(1.0, 1.0))) == []


def test_a_rank_without_peers_has_to_lose_much_of_a_step() -> None:
    """Half of 50 ms is what threads and the system take."""
    assert slow(alone(1, 1, 1).scores(windows(0.01, 0.035, 0.01))) == []
    assert slow(alone(1, 1, 1).scores(windows(0.1, 0.35, 0.1))) == [1]
    assert slow(same(3).scores(windows(0.01, 0.035, 0.01))) == [1], "peers have the same threads"


def test_little_work_counts_as_half_of_the_mean() -> None:
    """An embedding has hardly any FLOPs."""
    assert slow(alone(0, 1, 1, 1).scores(windows(0.4, 1.0, 1.0, 1.0))) == []
    assert slow(alone(0, 1, 1, 1).scores(windows(2.0, 1.0, 1.0, 1.0))) == [0]
    assert slow(alone(0, 0).scores(windows(1.0, 1.0))) == []


def test_noise_makes_no_straggler() -> None:
    """Steps take from 0.4 to 1.6 of their time, and medians of a window differ by up to 1.6."""
    noisy, clear = Stragglers(), Stragglers()
    largest = 0.0
    for seed in range(200):
        scores = same(4).scores(windows(1, 1, 1, 1, noise=0.6, seed=seed))
        largest = max(largest, *values(scores))
        assert noisy.changes(1, STEPS, scores) == []
        scores = same(4).scores(windows(1, 1, 1, 2, noise=0.3, seed=seed))
        assert slow(scores) == [3]
        assert bool(clear.changes(1, STEPS, scores)) == (seed == 1)
    assert largest > 1.4


def test_windows_of_one_step() -> None:
    """They tell nothing of noise, so many of them have to agree."""
    scorer, stragglers = same(3), Stragglers()
    for first in range(1, LEAST + 1):
        scores = scorer.scores(windows(1, 1, 2, steps=1, seed=first))
        assert slow(scores) == [2]
        changes = stragglers.changes(first, 1, scores)
        assert [(change.what, change.since) for change in changes] == [("slow", 1)] * (
            first == LEAST
        )
    assert slow(scorer.scores(windows(1, 1, 1, steps=1))) == []


def test_ranks_that_take_no_time() -> None:
    assert values(same(3).scores(windows(0.0, 0.0, 0.0))) == [1.0] * 3


class Job:
    """Two peers, the second of which takes a factor of the first's time."""

    def __init__(self) -> None:
        self.scorer, self.stragglers = same(2), Stragglers()
        self.first = 1

    def window(self, factor: float) -> tuple[str, int] | None:
        changes = self.stragglers.changes(
            self.first, STEPS, self.scorer.scores(windows(1.0, factor, noise=0.01, seed=self.first))
        )
        self.first += STEPS
        if not changes:
            return None
        (change,) = changes
        assert change.score.rank == 1
        return change.what, change.since


def told(*factors: float) -> list[tuple[str, int] | None]:
    job = Job()
    return [job.window(factor) for factor in factors]


def test_two_windows_in_a_row_name_a_rank() -> None:
    assert told(2, 1, 2, 2, 2, 2) == [None, None, None, ("slow", 41), None, None]
    assert told(2, 1, 2, 1, 2) == [None] * 5


def test_a_rank_is_named_again_when_it_has_changed() -> None:
    assert told(2, 2, 2.5, 2.8) == [None, ("slow", 1), None, None]
    assert told(2, 2, 4, 2, 4, 4, 4) == [None, ("slow", 1), *[None] * 3, ("still", 1), None]
    assert told(4, 4, 2, 2)[-1] == ("still", 1)


def test_it_is_told_when_it_is_over() -> None:
    assert told(2, 2, 1, 1, 1) == [None, ("slow", 1), None, ("fine", 41), None]
    assert told(2, 2, 1.2, 1.2, 1, 2, 1) == [None, ("slow", 1), *[None] * 5], "between the two"
    assert told(2, 2, 1, 1, 2, 2)[-1] == ("slow", 81)
