"""The split, the counts and the sample index against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

import megapipe.data.indices.samples as module
from megapipe.data.indices import EpochCounts, sample_index
from megapipe.data.split import split_ranges
from megapipe.errors import ConfigError, DataError


def walked(lengths: list[int], documents: list[int], sequence_length: int, rows: int) -> list:
    """Walk from each row on through the documents until L + 1 tokens have been seen."""
    found = [[0, 0]]
    at, place = 0, 0
    while len(found) <= rows:
        missing = sequence_length + 1
        while missing > lengths[documents[at]] - place:
            missing -= lengths[documents[at]] - place
            if at == len(documents) - 1:
                place, missing = lengths[documents[at]], 0
                break
            at, place = at + 1, 0
        place += missing - 1
        found.append([at, place])
    return found


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_those_of_a_walk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    for number in range(150):
        monkeypatch.setattr(module, "_AT_ONCE", int(random.choice([1, 10, 2**16])))
        n = int(random.integers(1, 40))
        lengths = (
            random.integers(0, 12, n),
            random.integers(0, 2, n),
            np.ones(n),
            random.integers(0, 3, n) * random.integers(0, 300, n),
        )[number % 4].astype(np.int32)
        sequence_length = int(random.integers(1, 25))
        if number % 25 == 0:  # sums that int32 cannot hold
            lengths = (lengths.astype(np.int64) * 2**23).clip(0, 2**31 - 1).astype(np.int32)
            sequence_length = int(random.integers(2**20, 2**31 - 1))
        documents = np.tile(np.arange(n, dtype=np.int32), int(random.integers(1, 4)))
        random.shuffle(documents)
        labels = int(lengths[documents].sum(dtype=np.int64)) - 1
        for samples in {0, max(labels, 0) // sequence_length, -(-labels // sequence_length) + 1}:
            if labels < 0:
                continue
            found = sample_index(lengths, documents, sequence_length, samples)
            expected = walked(lengths.tolist(), documents.tolist(), sequence_length, samples)
            assert found.dtype == np.int32
            assert found.tolist() == expected


def test_rows_of_more_documents_than_int32_can_number() -> None:
    """Their columns are written apart."""
    lengths = np.random.default_rng(0).integers(0, 9, 500).astype(np.int32)
    documents = np.arange(500, dtype=np.int32)
    narrow = sample_index(lengths, documents, 5, 300)
    wide = np.zeros((301, 2), "<i8")
    rows = module._Rows(wide, 5)
    for first, ends in module._ends(lengths, documents, 5, 100):
        rows.write(first, ends)
    assert rows.written == 301
    assert wide[1:].tolist() == narrow[1:].tolist()


def test_counts() -> None:
    assert EpochCounts.of(100, 10, None) == EpochCounts(1, 9, None)
    assert EpochCounts.of(101, 10, 10) == EpochCounts(1, 10, None)
    assert EpochCounts.of(101, 10, 11) == EpochCounts(2, 20, 10), (
        "1 of the 10 samples of the last epoch"
    )
    assert EpochCounts.of(101, 10, 17) == EpochCounts(2, 20, 10)
    assert EpochCounts.of(101, 10, 18) == EpochCounts(2, 20, None), "8 are 80 %"
    assert EpochCounts.of(2, 10, 3) == EpochCounts(16, 3, None)
    assert EpochCounts.of(5, 10, None, keep_last=True) == EpochCounts(1, 1, None)
    assert EpochCounts.of(2**25 + 2, 2**20, None, keep_last=True).samples == 32, (
        "in single precision"
    )
    for epochs in range(2, 7):
        for wanted in range(1, 60):
            counts = EpochCounts.of(13, epochs, wanted)
            assert counts.samples >= wanted
            assert (counts.epochs - 1) * 13 < wanted * epochs + 1 <= counts.epochs * 13
    for tokens, wanted in ((0, 5), (1, 5), (10, None)):
        with pytest.raises(DataError, match=f"{tokens} tokens, but a sample needs 11"):
            EpochCounts.of(tokens, 10, wanted)


def test_splits() -> None:
    assert split_ranges("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    assert split_ranges("1", 7) == (range(7), range(7, 7), range(7, 7))
    assert split_ranges(" 1, 1 ", 5) == (range(2), range(2, 5), range(5, 5)), "2.5 rounds to even"
    for wrong in ("", "1;1", "-1,2", "1,1,1,1", "1e3,1", "0,0", "nan"):
        with pytest.raises(ConfigError, match=r"data\.split="):
            split_ranges(wrong, 10)
