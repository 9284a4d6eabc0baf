from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from megapipe.data.order import order, splitmix64

SIZES = [*range(1, 70), 127, 128, 129, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 10007]


def epoch(seed: int, n: int, number: int) -> list[int]:
    return [order(seed, n, number * n + i) for i in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_each_epoch_is_a_permutation(n: int) -> None:
    for number in (0, 1, 7):
        assert sorted(epoch(3, n, number)) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    runs = [tuple(epoch(seed, 500, number)) for seed in (0, 1, 2**63 - 1) for number in range(4)]
    assert len(set(runs)) == len(runs)
    for a in range(len(runs)):
        for b in range(a):
            agreeing = sum(x == y for x, y in zip(runs[a], runs[b], strict=True))
            assert agreeing <= 8  # chance: 1, Poisson


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_epochs_take_every_permutation_about_equally_often(n: int) -> None:
    counts = Counter(tuple(epoch(11, n, number)) for number in range(4800))
    every = list(permutations(range(n)))
    expected = 4800 / len(every)
    chi2 = sum((counts[p] - expected) ** 2 / expected for p in every)
    assert chi2 < len(every) - 1 + 6 * (2 * len(every)) ** 0.5


@pytest.mark.parametrize("n", [100, 1000, 4096])
def test_looks_mixed(n: int) -> None:
    """Order statistics of a random permutation: no trend, no runs, neighbours far apart."""
    for seed in range(5):
        values = np.array(epoch(seed, n, 0))
        index = np.arange(n)
        assert abs(np.corrcoef(index, values)[0, 1]) < 5 / n**0.5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / n**0.5
        ascents = (np.diff(values) > 0).sum()
        assert abs(ascents - (n - 1) / 2) < 5 * ((n + 1) / 12) ** 0.5
        assert abs(np.abs(np.diff(values)).mean() / (n / 3) - 1) < 0.25
        assert (values == index).sum() <= 8


def test_where_a_sample_lands_is_uniform() -> None:
    counts = np.zeros((16, 16))
    for number in range(3200):
        for i, value in enumerate(epoch(5, 16, number)):
            counts[i, value] += 1
    chi2 = ((counts - 200) ** 2 / 200).sum()  # 15 x 15 degrees of freedom
    assert chi2 < 225 + 6 * (2 * 225) ** 0.5


def test_a_distant_index_of_a_huge_corpus_costs_no_memory_and_no_history() -> None:
    n = 10**12 + 39
    values = [order(1, n, 10**15 + i) for i in range(200)]
    assert all(0 <= value < n for value in values)
    assert len(set(values)) == 200


def test_the_order_never_changes() -> None:
    """A resumed run must see the order of the version that began it."""
    assert epoch(1234, 10, 0) == [9, 6, 1, 4, 2, 3, 5, 7, 8, 0]
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator, seed 0
