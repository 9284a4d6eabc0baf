from pathlib import Path

import numpy as np
import pytest

from megapipe.data.dataset import TokenDataset
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError


def stream(folder: Path, length: int) -> TokenFile:
    """Write a file whose token at position i is i, in documents of up to 7 tokens."""
    with TokenWriter(folder / "x", token_type(60000), 60000) as writer:
        for start in range(0, length, 7):
            writer.add(np.arange(start, min(start + 7, length)))
    return TokenFile(folder / "x")


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 40, 41])
@pytest.mark.parametrize("keep_last", [False, True])
def test_each_token_but_the_first_is_a_label_once(
    tmp_path: Path, length: int, keep_last: bool
) -> None:
    dataset = TokenDataset(stream(tmp_path, length), 8, keep_last=keep_last)
    samples = [dataset.sample(i) for i in range(len(dataset))]
    labels = [int(token) for sample in samples for token in sample[1:]]
    full = (length - 1) // 8 * 8
    assert labels == list(range(1, length if keep_last else full + 1))
    assert [int(sample[0]) for sample in samples] == list(range(0, len(labels), 8))
    assert all(sample.dtype == np.int64 for sample in samples)
    assert all(len(sample) == 9 for sample in samples[:-1])
    assert 2 <= len(samples[-1]) <= 9


def test_no_sample_beyond_the_last(tmp_path: Path) -> None:
    dataset = TokenDataset(stream(tmp_path, 17), 8)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            dataset.sample(index)


def test_too_short(tmp_path: Path) -> None:
    file = stream(tmp_path, 8)
    with pytest.raises(
        DataError, match=r"x\.bin has 8 tokens, but one sample needs 9 \(train\.sequence_length=8\)"
    ):
        TokenDataset(file, 8)
    assert len(TokenDataset(file, 8, keep_last=True)) == 1
    with pytest.raises(DataError, match=r"has 1 token, but one sample needs 2"):
        TokenDataset(stream(tmp_path, 1), 8, keep_last=True)
