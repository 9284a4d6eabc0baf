from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.config.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from megapipe.data.batch import Batches, SampleSource
from megapipe.data.build import build_batches
from megapipe.data.dataset import TokenDataset
from megapipe.data.order import order
from megapipe.data.prepare import prepare
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError

L = 8
EOD = 256


def batches(
    folder: Path,
    tokens: Any,
    *,
    keep_last: bool = False,
    shuffle: bool = False,
    repeat: bool = True,
    most: int = 60000,
    **settings: Any,
) -> Batches:
    with TokenWriter(folder / "x", token_type(most), most) as writer:
        writer.add(np.asarray(tokens))
    dataset = TokenDataset(TokenFile(folder / "x"), L, keep_last=keep_last)
    n = len(dataset)

    def sample_at(number: int) -> int | None:
        if number >= n and not repeat:
            return None
        return order(1, n, number) if shuffle else number % n

    defaults = {"vocab_size": 257, "mask_document_ends": False, "eod": EOD}
    return Batches([SampleSource(dataset, sample_at)], **(defaults | settings))


def test_rows_in_file_order(tmp_path: Path) -> None:
    tokens, labels, mask = batches(tmp_path, np.arange(33)).rows([0, 3, 1])[:3]
    assert tokens.tolist() == [list(range(i * L, i * L + L)) for i in (0, 3, 1)]
    assert torch.equal(labels, tokens + 1)
    assert (tokens.dtype, labels.dtype, mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert mask.all()
    assert mask.shape == (3, L)


def test_training_takes_each_sample_once_per_epoch(tmp_path: Path) -> None:
    training = batches(tmp_path, np.arange(10 * L + 1), shuffle=True)
    for epoch in range(3):
        first = training.rows(range(epoch * 10, epoch * 10 + 10))[0][:, 0] // L
        assert sorted(first.tolist()) == list(range(10))
        assert first.tolist() == [order(1, 10, epoch * 10 + i) for i in range(10)]


def test_a_row_depends_on_its_number_alone(tmp_path: Path) -> None:
    """It does not matter how numbers are dealt to replicas, micro-batches or a resumed run."""
    training = batches(tmp_path, np.arange(10 * L + 1), shuffle=True)
    whole = training.rows(range(24))[:3]
    for size in (1, 2, 3, 8):
        parts = [training.rows(range(i, i + size)) for i in range(0, 24, size)]
        for i, tensor in enumerate(whole):
            assert torch.equal(torch.cat([part[i] for part in parts]), tensor)


def test_validation_scores_every_held_out_token_once(tmp_path: Path) -> None:
    length = 5 * L + 4
    validation = batches(
        tmp_path, np.arange(length) % 200, keep_last=True, shuffle=True, repeat=False
    )
    assert len(validation) == 6
    tokens, labels, mask = validation.rows(range(8))[:3]
    assert mask.sum() == length - 1
    assert sorted(labels[mask].tolist()) == sorted((np.arange(1, length) % 200).tolist())
    assert not mask[6:].any()
    assert (tokens[6:] == EOD).all()
    assert (labels[6:] == EOD).all()
    short = [row for row in range(6) if not mask[row].all()]
    assert len(short) == 1
    assert mask[short[0]].tolist() == [True] * 3 + [False] * 5


def test_document_ends_can_be_left_out(tmp_path: Path) -> None:
    stream = [1, 2, EOD, 3, EOD, EOD, 4, 5, 6]
    _, labels, mask = batches(tmp_path, stream).rows([0])[:3]
    assert mask.all()
    _, labels, mask = batches(tmp_path, stream, mask_document_ends=True).rows([0])[:3]
    assert torch.equal(mask, labels != EOD)
    assert mask.sum() == 5


@pytest.mark.parametrize("position", [0, 7, 8, 9, 32])
@pytest.mark.parametrize("wrong", [257, 59999])
def test_token_outside_the_vocabulary(tmp_path: Path, position: int, wrong: int) -> None:
    tokens = np.zeros(33, dtype=np.int64)
    tokens[position] = wrong
    training = batches(tmp_path, tokens)
    with pytest.raises(
        DataError,
        match=rf"^token id {wrong} at position {position} of .*/x\.bin is outside the "
        r"vocabulary \(0 to 256\)$",
    ):
        training.rows(range(4))


def test_negative_token(tmp_path: Path) -> None:
    training = batches(tmp_path, np.zeros(33, dtype=np.int64), most=70000, vocab_size=70000)
    np.memmap(tmp_path / "x.bin", np.int32, "r+")[20] = -1
    with pytest.raises(DataError, match="token id -1 at position 20 of"):
        training.rows(range(4))


def config(data: DataConfig, *, seed: int = 1, vocab_size: int | None = None) -> Config:
    return Config(
        run=RunConfig(seed=seed),
        data=data,
        model=ModelConfig(vocab_size=vocab_size),
        train=TrainConfig(sequence_length=16),
    )


def both(whole: Config) -> tuple[Batches, Batches]:
    """Build the batches of training and of the one held-out set."""
    tokenizer = ByteTokenizer()
    train, (held_out,) = build_batches(whole, tokenizer, load_sources(whole, tokenizer))
    return train, held_out.batches


def test_built_from_a_config(folder_config: DataConfig) -> None:
    tokenizer = ByteTokenizer()
    divided = folder_config.model_copy(update={"validation_fraction": 0.2})
    meta = prepare(divided, tokenizer).meta
    assert meta.validation is not None
    (train, validation), (other_train, other_validation) = (
        both(config(divided, seed=seed)) for seed in (1, 2)
    )
    assert len(train) == (meta.train.tokens - 1) // 16
    assert len(validation) == -(-(meta.validation.tokens - 1) // 16)
    numbers = range(len(validation) + 3)
    rows, other_rows = validation.rows(numbers)[:3], other_validation.rows(numbers)[:3]
    assert rows[2].sum() == meta.validation.tokens - 1
    assert all(torch.equal(a, b) for a, b in zip(rows, other_rows, strict=True))
    assert not torch.equal(train.rows(range(32))[0], other_train.rows(range(32))[0])
    first_places = [order(0, len(validation), i) for i in range(8)]
    assert first_places != sorted(first_places)  # the first samples are from all over


def test_the_models_vocabulary_is_the_bound(folder_config: DataConfig) -> None:
    train, _ = both(config(folder_config, vocab_size=100))
    with pytest.raises(DataError, match=r"is outside the vocabulary \(0 to 99\)"):
        train.rows(range(len(train)))
    train, _ = both(config(folder_config, vocab_size=300))
    train.rows(range(len(train)))
