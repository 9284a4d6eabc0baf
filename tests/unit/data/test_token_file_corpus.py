"""Token files that the user has, as ``data.source``."""

import struct
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.config import Config, DataConfig, TrainConfig
from megapipe.data.build import build_batches
from megapipe.data.dataset import Split, Stream, TokenDataset
from megapipe.data.sources import Sources, load_sources
from megapipe.data.stored import write_checksums
from megapipe.data.token_file_corpus import TokenFileCorpus, given_tokens, is_token_file
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of, token_type
from megapipe.errors import DataError


def write(prefix: Path, documents: list[list[int]]) -> Path:
    with TokenWriter(prefix, token_type(257), 257) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return prefix


def config(source: Path | str, fraction: float = 0.02) -> DataConfig:
    return DataConfig(source=str(source), validation_fraction=fraction)


def part(corpus: TokenFileCorpus, split: Split) -> Stream:
    found = corpus.part(split)
    assert found is not None
    return found


def test_a_prefix_and_its_files_name_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x.v1", [[1, 2], [3, 4]])
    for name in ("x.v1", "x.v1.bin", "x.v1.idx"):
        assert is_token_file(str(tmp_path / name))
        assert part(given_tokens(config(tmp_path / name)), "train").file.prefix == prefix
    assert not is_token_file("stdlib")
    assert not is_token_file(str(tmp_path))
    assert not is_token_file(str(tmp_path / "y"))
    assert not is_token_file(str(tmp_path / "y.bin"))
    (tmp_path / "x.v1").write_text("a text of that name comes first")
    assert not is_token_file(str(tmp_path / "x.v1"))


def test_the_cache_that_megatron_lm_leaves_beside_it_is_no_corpus(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2], [3, 4]])
    (prefix / "cache/GPTDataset_indices").mkdir(parents=True)
    assert is_token_file(str(prefix))
    (prefix / "a.txt").write_text("texts of that name come first")
    assert not is_token_file(str(prefix))


@pytest.mark.parametrize("left", ["bin", "idx"])
def test_a_half_is_missed(tmp_path: Path, left: str) -> None:
    prefix = write(tmp_path / "x", [[1, 2], [3, 4]])
    (tmp_path / f"x.{'idx' if left == 'bin' else 'bin'}").unlink()
    assert is_token_file(str(prefix))
    with pytest.raises(DataError, match=r"token file .*/x\.\w\w\w: No such file"):
        given_tokens(config(prefix))


@pytest.mark.parametrize(
    ("lengths", "fraction", "cut"),
    [
        ([5] * 100, 0.02, 490),
        ([5] * 100, 0.5, 250),
        ([5] * 100, 1e-9, 495),
        ([5] * 100, 1 - 1e-9, 5),
        ([10, 2], 0.02, 10),
        ([100], 0.02, 98),
        ([2], 0.02, 1),
        ([2], 0.98, 1),
        ([0, 3], 0.5, 2),
        ([3, 0, 0], 0.5, 2),
        ([61] * 60 + [0], 0.02, 59 * 61),
        ([0, 0, 5, 0, 7, 0], 0.9, 5),
    ],
)
def test_the_last_documents_are_held_out(
    tmp_path: Path, lengths: list[int], fraction: float, cut: int
) -> None:
    prefix = write(tmp_path / "x", [[1] * length for length in lengths])
    found = given_tokens(config(prefix, fraction))
    total = sum(lengths)
    train, validation = part(found, "train"), part(found, "validation")
    assert (train.positions, validation.positions) == (range(cut), range(cut, total))


def test_samples_are_of_their_split(tmp_path: Path) -> None:
    documents = [[i % 250] * 9 + [256] for i in range(50)]
    prefix = write(tmp_path / "x", documents)
    corpus = given_tokens(config(prefix, 0.1))
    stream = [token for document in documents for token in document]
    streams = part(corpus, "train"), part(corpus, "validation")
    train, validation = (
        TokenDataset(stream.file, 8, stream.positions, keep_last=keep_last)
        for stream, keep_last in zip(streams, (False, True), strict=True)
    )
    assert len(train) == (450 - 1) // 8
    assert len(validation) == -(-49 // 8)
    labels = [i for k in range(len(validation)) for i in validation.labelled(k).labels.tolist()]
    assert labels == stream[451:]
    labels = [i for k in range(len(train)) for i in train.labelled(k).labels.tolist()]
    assert labels == stream[1 : 1 + len(labels)]
    assert validation.describe_position(0, 3, label=True) == f"position 454 of {tmp_path / 'x.bin'}"
    with pytest.raises(DataError, match=r"x\.bin has 50 tokens from position 450 to 500, but one"):
        TokenDataset(streams[1].file, 80, streams[1].positions)


def test_batches_of_a_token_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[i, i + 1, 256] for i in range(200)])
    whole = Config(data=config(prefix, 0.25), train=TrainConfig(sequence_length=10))
    train, (held_out,) = build_batches(whole, ByteTokenizer(), load_sources(whole, ByteTokenizer()))
    stream, validation = part(given_tokens(whole.data), "train").file.tokens, held_out.batches
    tokens, labels, mask = train.rows(range(len(train)))[:3]
    assert tokens.shape == (44, 10)
    assert sorted(labels[mask].tolist()) == sorted(stream[1:441].tolist())
    _, labels, mask = validation.rows(range(len(validation)))[:3]
    assert sorted(labels[mask].tolist()) == sorted(stream[451:].tolist())


def test_content_follows_tokens_and_splits_not_the_place(tmp_path: Path) -> None:
    documents = [[i % 250] * 9 + [256] for i in range(500)]
    seen = {given_tokens(config(write(tmp_path / "x", documents))).content}
    assert given_tokens(config(write(tmp_path / "y", documents))).content in seen
    seen.add(given_tokens(config(tmp_path / "x", 0.5)).content)
    seen.add(given_tokens(config(write(tmp_path / "x", documents[1:]))).content)
    seen.add(given_tokens(config(write(tmp_path / "x", documents[1:] + documents[:1]))).content)
    seen.add(given_tokens(config(write(tmp_path / "x", [[1, 2], *documents[2:]]))).content)
    assert len(seen) == 5


def test_checksums_tell_files_apart_that_differ_between_the_places_looked_at(
    tmp_path: Path,
) -> None:
    ids = (np.arange(200_000) % 250).tolist()
    changed = [*ids[:1500], 7, *ids[1501:]]

    def sources(name: str, ids: list[int], first: int = 100) -> Sources:
        documents = [ids[:first], ids[first:1000], ids[1000:]]
        if not (tmp_path / f"{name}.bin").exists():
            write(tmp_path / name, documents)
        return load_sources(Config(data=config(tmp_path / name)), ByteTokenizer())

    given = {"same": (ids,), "copy": (ids,), "tokens": (changed,), "index": (ids, 150)}
    plain = {name: sources(name, *made) for name, made in given.items()}
    assert len({each.everything for each in plain.values()}) == 1
    for name in given:
        for kind in (bin_of, idx_of):
            write_checksums(kind(tmp_path / name))
    summed = {name: sources(name, *made) for name, made in given.items()}

    def alike(a: Sources, b: Sources) -> bool:
        return a.is_like(b.everything, b.files)

    for name in given:
        assert alike(plain["same"], plain[name])
        assert alike(plain["same"], summed[name]), "one side has no checksums"
        assert alike(summed[name], plain["same"])
        assert alike(summed["same"], summed[name]) == (name in ("same", "copy"))


@pytest.mark.parametrize(("tokens", "words"), [(0, "0 tokens"), (1, "1 token")])
def test_nothing_to_hold_out(tmp_path: Path, tokens: int, words: str) -> None:
    prefix = write(tmp_path / "x", [[1] * tokens])
    with pytest.raises(DataError, match=rf"x\.bin has {words}: nothing to hold out"):
        given_tokens(config(prefix))


def test_no_tokens_make_no_sample(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[], []])
    stream = part(given_tokens(config(prefix, 0)), "train")
    for keep_last in (True, False):
        with pytest.raises(DataError, match=r"x\.bin has 0 tokens"):
            TokenDataset(stream.file, 4, stream.positions, keep_last=keep_last)


@pytest.mark.parametrize(
    ("lengths", "split", "purpose"),
    [
        ([20, 20, 0, 0], "50,50,0", "to validate on: expected a larger second weight, or 0"),
        ([0, 0, 20, 20], "50,50,0", "to train on: expected a larger first weight"),
        ([20, 20, 20, 0], "50,25,25", "to test on: expected a larger third weight, or 0"),
    ],
)
def test_a_split_that_leaves_empty_documents(
    tmp_path: Path, lengths: list[int], split: str, purpose: str
) -> None:
    """Empty documents have a sequence of no tokens, as split_ranges counts sequences."""
    prefix = tmp_path / "x"
    with TokenWriter(prefix, token_type(257), 257) as writer:
        for length in lengths:
            writer.write(np.ones(length, np.int64))
            writer.close_sequences(np.array([length], np.int32), np.array([1]))
    said = rf"data.split={split} leaves only empty documents of the 4 sequences of .*x.bin "
    with pytest.raises(DataError, match=said + purpose):
        given_tokens(config(prefix).model_copy(update={"split": split}))


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2], [3, 4]])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[17:18] = struct.pack("<B", 7)
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"x\.idx declares token type 7; known integer types"):
        given_tokens(config(prefix))
