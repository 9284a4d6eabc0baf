"""Indices in their folder and the samples that they give."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.indices import (
    Blend,
    IndexedDataset,
    Request,
    blend_index,
    open_indices,
)
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.errors import ConfigError, DataError


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    """Write 150 sequences of 0 to 36 tokens; token i of sequence k is 7i mod 1000 + k."""
    numbers = np.arange(150)
    lengths = numbers**2 % 37 * (numbers % 5 > 0)
    with TokenWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for number, length in enumerate(lengths):
            writer.write(np.arange(length) * 7 % 1000 + number)
            writer.close_sequences(np.array([length], np.int32), np.array([1]))
    return TokenFile(tmp_path / "x")


def digest(*arrays: np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape!r}".encode() + array.tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("given", "indices", "labels"),
    [
        (((0, 150), 8, None, 1234), "0f4250d6b1c8fd71", "6e98b521430ce404"),
        (((0, 150), 8, 700, 1234), "ea2de90912d4fa5e", "af61232ea287fdff"),
        (((0, 150), 8, 1100, 1), "9683c73d188e4921", "9eac53396001074c"),
        (((20, 130), 64, 100, 2**32 - 1), "a051f4e01103b772", "c4074e6f29154848"),
        (((100, 149), 5, None, 7, True), "cac85fa68a0b9d20", "0c318bb251d8415f"),
        (((0, 150), 2000, 3, 0), "c88281c528e48224", "a99d14e9daaeb942"),
    ],
)
def test_megatron_cores(
    file: TokenFile, tmp_path: Path, given: tuple, indices: str, labels: str
) -> None:
    """Digests of megatron-core 0.16.1's GPTDataset over this file: its document, sample and shuffle
    index, and the labels of all of its samples whose loss mask is 1. Arguments are the sequences,
    L, the samples wanted, the seed, and, with True, the split `valid` with
    drop_last_partial_validation_sequence=False. Its own output is compared where it is installed,
    in tests/external."""
    (start, stop), sequence_length, *rest = given
    found = open_indices(file, Request(range(start, stop), sequence_length, *rest), tmp_path / "c")
    assert digest(found.documents[:], found.samples[:], found.shuffle[:]) == indices
    dataset = IndexedDataset(file, found, sequence_length)
    samples = [dataset.labelled(i) for i in range(len(dataset))]
    assert digest(np.concatenate([sample.labels for sample in samples])) == labels
    assert all(sample.mask.all() for sample in samples)
    assert all(np.array_equal(s.tokens[1:], s.labels[: len(s.tokens) - 1]) for s in samples)
    short = [s for s in samples if len(s.labels) != sequence_length]
    assert len(short) == (len(given) > 4)


def test_a_place_is_that_of_the_token(file: TokenFile, tmp_path: Path) -> None:
    dataset = IndexedDataset(file, open_indices(file, Request(range(150), 60, 50, 3), tmp_path), 60)
    for index in (0, 7, 49):
        sample = dataset.labelled(index)
        for at in (0, 1, 30, 59):
            for ids, label in ((sample.tokens, False), (sample.labels, True)):
                place = dataset.describe_position(index, at, label=label)
                position = int(place.removeprefix("position ").removesuffix(f" of {file.path}"))
                assert file.tokens[position] == ids[at]
    for wrong in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {wrong} of {len(dataset)}"):
            dataset.labelled(wrong)
    with pytest.raises(IndexError, match="token 61 behind the end"):
        dataset.describe_position(0, 61, label=False)


def test_they_are_made_once(file: TokenFile, tmp_path: Path) -> None:
    def folders() -> set[Path]:
        return set((tmp_path / "c").iterdir())

    open_indices(file, Request(range(150), 8, 500, 1), tmp_path / "c")
    (folder,) = folders()
    changed = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    open_indices(file, Request(range(150), 8, 502, 1), tmp_path / "c")
    assert folders() == {folder}, "as many epochs"
    assert changed == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for other in (
        Request(range(149), 8, 500, 1),
        Request(range(150), 9, 500, 1),
        Request(range(150), 8, 5000, 1),
        Request(range(150), 8, 500, 2),
    ):
        before = len(folders())
        open_indices(file, other, tmp_path / "c")
        assert len(folders()) == before + 1


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.canary,)


def test_damage(file: TokenFile, tmp_path: Path) -> None:
    request = Request(range(150), 8, 500, 1)
    open_indices(file, request, tmp_path / "c")
    (folder,) = (tmp_path / "c").iterdir()
    path = folder / "sample_index.npy"
    whole = path.read_bytes()
    overwritten = whole[:20] + b"\0" + whole[21:], whole.replace(b"}", b"(", 1)
    for content in (whole[:-1], whole[:20], b"", b"x" * len(whole), *overwritten):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"sample_index\.npy is damaged: remove .* is rebuilt"):
            open_indices(file, request, tmp_path / "c")
    header = {"descr": "<i4", "fortran_order": False, "shape": (2**60, 2)}
    with path.open("wb") as file_of_objects:
        np.lib.format.write_array(file_of_objects, np.array([Payload(tmp_path / "canary")]))
    objects = path.read_bytes()
    with path.open("wb") as bomb:
        np.lib.format.write_array_header_1_0(bomb, header)
    for content in (objects, path.read_bytes() + whole[128:]):
        path.write_bytes(content)
        began = time.process_time()
        with pytest.raises(DataError, match=r"sample_index\.npy is damaged: remove .* is rebuilt"):
            open_indices(file, request, tmp_path / "c")
        assert time.process_time() - began < 1
    assert not (tmp_path / "canary").exists()
    np.save(path, np.zeros((3, 2), np.int32))
    with pytest.raises(DataError, match=r"shape \(3, 2\) of int32, not \(533, 2\) of <i4: remove"):
        open_indices(file, request, tmp_path / "c")
    path.unlink()
    with pytest.raises(DataError, match=r"sample_index\.npy: No such file"):
        open_indices(file, request, tmp_path / "c")
    with pytest.raises(DataError, match=r"indices .*x\.bin: File exists"):
        open_indices(file, request, file.path)


def test_a_damaged_token_file(file: TokenFile, tmp_path: Path) -> None:
    request = Request(range(150), 8, None, 1)
    indices = open_indices(file, request, tmp_path / "c")
    content = bytearray(file.index_path.read_bytes())
    offsets = np.frombuffer(content, "<i8", 150, 34 + 4 * 150)
    for wrong, message in (
        (offsets[::-1], "x.idx and .*sample_index.npy do not agree about sample 0: one of them"),
        (offsets // 4 * 2, "x.idx and .*sample_index.npy do not agree about sample"),
        (offsets + 2 * len(file.tokens), "x.idx is damaged: it names tokens outside .*x.bin"),
    ):
        overwritten = content.copy()
        np.frombuffer(overwritten, "<i8", 149, 34 + 4 * 150)[:] = wrong[:-1]
        file.index_path.write_bytes(overwritten)
        dataset = IndexedDataset(TokenFile(file.prefix), indices, 8)
        with pytest.raises(DataError, match=message):
            [dataset.labelled(number) for number in range(len(dataset))]
    content[34 + 4 * 3] ^= 1  # the length of sequence 3
    file.index_path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.idx is damaged: its lengths and offsets do not agree"):
        open_indices(TokenFile(file.prefix), request, tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_what_cannot_be(file: TokenFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed -1: expected 0 to 4294967295"):
        open_indices(file, Request(range(150), 8, 5, -1), tmp_path)
    where = r"x\.bin \(sequences 0 to 1\) has 0 tokens, but a sample needs 9 \(train\.sequence_l"
    with pytest.raises(DataError, match=where):
        open_indices(file, Request(range(1), 8, 5, 1), tmp_path)


def test_a_blend() -> None:
    """Counts of its first samples, without going through them all."""
    index = blend_index([0.0004, 0.25, 0.7496], 6000)
    blend = Blend(index, 3)
    assert len(blend) == 6000
    assert [blend(sample) for sample in (0, 1, 2)] == [(2, 0), (1, 0), (2, 1)]
    for samples in (0, 1, 2, 1023, 1024, 1025, 3000, 5999, 6000, 7000):
        counts = np.bincount(index[0][:samples], minlength=3).tolist()
        assert blend.taken(samples) == counts
    blend.check(6000)
    for wrong in (lambda: blend.check(6001), lambda: blend(6000), lambda: blend(-1)):
        with pytest.raises(DataError, match="its sources are used up after 6000 samples"):
            wrong()
