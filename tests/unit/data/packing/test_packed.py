"""Samples of packed documents: every label once, each in its own document."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.dataset import Stream
from megapipe.data.packing import PackedDataset, PackingRule, index, open_packing
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError

L = 16
EOD = 999
LENGTHS = (3, 40, 1, 17, 18, 2, 9, 9, 0, 33, 5, 16, 1, 4)


def write(prefix: Path, lengths: tuple[int, ...] = LENGTHS) -> TokenFile:
    """Write documents of these lengths, whose tokens count on from 0 through the file."""
    with TokenWriter(prefix, token_type(1000), 1000) as writer:
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            writer.add(np.arange(start, start + length))
    return TokenFile(prefix)


def dataset(folder: Path, sequences: range | None = None, length: int = L) -> PackedDataset:
    file = write(folder / "x")
    packing = open_packing(Stream.of(file, sequences), PackingRule(length), folder / "cache")
    return PackedDataset(file, packing, length, EOD)


def labels_of(lengths: tuple[int, ...]) -> Counter[int]:
    """Count the labels: every token but the first of its document."""
    ends = np.cumsum(lengths)
    return Counter(
        token
        for end, length in zip(ends.tolist(), lengths, strict=True)
        for token in range(end - length + 1, end)
    )


@pytest.mark.parametrize("length", [1, 5, 16, 100])
@pytest.mark.parametrize("at_once", [1, 3, 2**22])
def test_every_label_once_and_in_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, at_once: int
) -> None:
    monkeypatch.setattr(index, "AT_ONCE", at_once)
    packed = dataset(tmp_path, length=length)
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    seen: Counter[int] = Counter()
    for number in range(len(packed)):
        sample = packed.labelled(number)
        assert sample.documents is not None
        assert len(sample.tokens) == len(sample.labels) == len(sample.documents) == length
        assert (np.diff(sample.documents) >= 0).all()
        tokens, labels = sample.tokens[sample.mask], sample.labels[sample.mask]
        assert (labels == tokens + 1).all()
        assert (document[tokens] == document[labels]).all()
        assert sample.mask.any()
        assert not sample.mask[sample.mask.sum() :].any(), "padding is at the end"
        assert (sample.tokens[~sample.mask] == EOD).all()
        for one in np.unique(sample.documents[sample.mask]):
            own = tokens[sample.documents[sample.mask] == one]
            assert (np.diff(own) == 1).all(), "a piece is in one place"
        assert not set(sample.documents[~sample.mask]) & set(sample.documents[sample.mask])
        seen.update(labels.tolist())
    assert seen == labels_of(LENGTHS)
    padding = sum(~packed.labelled(i).mask.any() for i in range(len(packed)))
    assert padding == 0
    unused = sum(int((~packed.labelled(i).mask).sum()) for i in range(len(packed)))
    assert packed.padded == pytest.approx(unused / (len(packed) * length))


def test_pieces_of_a_long_document_are_whole_samples(tmp_path: Path) -> None:
    packed = dataset(tmp_path)
    full = [i for i in range(len(packed)) if (packed.packing.lengths[:] == L).any()]
    assert len(full) == len(packed)
    assert (packed.packing.lengths[:] == L).sum() == 2 + 1 + 1 + 2, "of 40, 17, 18 and 33 tokens"


def test_a_split_has_its_own_documents(tmp_path: Path) -> None:
    packed = dataset(tmp_path, range(3, 8))
    seen = Counter(
        label
        for i in range(len(packed))
        for label in packed.labelled(i).labels[packed.labelled(i).mask].tolist()
    )
    first = sum(LENGTHS[:3])
    assert seen == Counter({first + label: 1 for label in labels_of(LENGTHS[3:8])})


def test_places_are_those_of_the_file(tmp_path: Path) -> None:
    packed = dataset(tmp_path)
    for number in range(len(packed)):
        sample = packed.labelled(number)
        for at in range(L):
            if not sample.mask[at]:
                assert packed.describe_position(number, at, label=False).startswith(
                    "padding of sample"
                )
                continue
            for label, value in ((False, sample.tokens[at]), (True, sample.labels[at])):
                expected = f"position {value} of {tmp_path / 'x.bin'}"
                assert packed.describe_position(number, at, label=label) == expected
    with pytest.raises(IndexError):
        packed.labelled(len(packed))


def test_it_is_made_once_and_checked(tmp_path: Path) -> None:
    first = dataset(tmp_path).packing
    (folder,) = (tmp_path / "cache").iterdir()
    made = folder.stat().st_mtime_ns
    stream = Stream.of(TokenFile(tmp_path / "x"))
    again = open_packing(stream, PackingRule(L), tmp_path / "cache")
    assert all(a[:].tolist() == b[:].tolist() for a, b in zip(first, again, strict=True))
    assert folder.stat().st_mtime_ns == made
    np.save(folder / "starts.npy", np.zeros(3, "<i8"))
    with pytest.raises(DataError, match=r"starts\.npy is damaged: bytes 0 to 152 do not"):
        open_packing(stream, PackingRule(L), tmp_path / "cache")
    np.save(folder / "starts.npy", np.zeros(3, "<i4"))
    with pytest.raises(DataError, match=r"starts.npy has shape \(3,\) of int32, not"):
        open_packing(stream, PackingRule(L), tmp_path / "cache")


@pytest.mark.parametrize("length", [0, 9, L + 1])
def test_an_older_one_without_checksums_that_is_damaged(tmp_path: Path, length: int) -> None:
    packed = dataset(tmp_path)
    (folder,) = tmp_path.glob("cache/packing-*")
    (folder / "lengths.npy.crc").unlink()
    np.save(folder / "lengths.npy", np.full(len(packed.packing.lengths), length, "<i4"))
    packing = open_packing(Stream.of(packed.file), PackingRule(L), tmp_path / "cache")
    again = PackedDataset(packed.file, packing, L, EOD)
    with pytest.raises(DataError, match=r"is damaged: sample \d+ has pieces of \d+ positions in t"):
        [again.labelled(number) for number in range(len(again))]


def test_another_file_of_that_name_is_packed_anew(tmp_path: Path) -> None:
    dataset(tmp_path)
    for suffix in ("bin", "idx"):
        (tmp_path / f"x.{suffix}").unlink()
    file = write(tmp_path / "x", (5, 5))
    packing = open_packing(Stream.of(file), PackingRule(L), tmp_path / "cache")
    assert packing.lengths[:].tolist() == [4, 4]


@pytest.mark.parametrize("lengths", [(), (1, 0, 1)])
def test_nothing_to_pack(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    file = write(tmp_path / "x", lengths)
    with pytest.raises(DataError, match=r"x\.bin has no document of 2 tokens or more to pack"):
        open_packing(Stream.of(file), PackingRule(L), tmp_path / "cache")
    assert not [path for path in tmp_path.glob("cache/*") if not path.name.startswith(".")]
